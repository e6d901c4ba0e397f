"""The tensors of a quantized checkpoint: which belong to a module, and how they are decoded.

    fp8, compressed-tensors   weight            float8_e4m3fn [n, k]
                              weight_scale_inv  blocks [⌈n / 128⌉, ⌈k / 128⌉] (DeepSeek-V3, Qwen3-FP8; a factor in
                                                spite of its name), or
                              weight_scale      one number, [n, 1] for rows, or blocks (compressed-tensors, AutoFP8)
    awq                       qweight           int32 [k, n / 8]
                              qzeros            int32 [k / group, n / 8]
                              scales            [k / group, n]
    gptq                      qweight           int32 [k / 8, n]
                              qzeros            int32 [k / group, n / 8], less one except in checkpoint_format gptq_v2
                              scales            [k / group, n]
                              g_idx             int32 [k], the group of each column (desc_act); may be missing

    pack-quantized            weight_packed     int32 [n, ⌈k / 8⌉], or [n, ⌈k / 4⌉] with 8 bits
    (compressed-tensors)      weight_scale      [n, k / group]
                              weight_zero_point int32 [⌈n / 8⌉, k / group], packed by rows; symmetric: missing
                              weight_g_idx      int32 [k], the group of each column (actorder); may be missing
    int-quantized             weight            int8 [n, k]
                              weight_scale      [n, k / group], or one number
                              weight_zero_point int8, as the scale; symmetric: missing
    mxfp4-pack-quantized      weight_packed     uint8 [n, k / 2], the even column in the low half
                              weight_scale      uint8 [n, k / 32], exponents of two plus 127
    nvfp4-pack-quantized      weight_packed     uint8 [n, k / 2], the even column in the low half
                              weight_scale      float8_e4m3fn [n, k / 16]
                              weight_global_scale  one number, by which the scales are divided
    modelopt's NVFP4          weight, weight_scale  the same
                              weight_scale_2    one number, by which the scales are multiplied

Eight 4-bit numbers share an int32, the first in the lowest bits; AWQ's are those of columns 0, 2, 4, 6, 1, 3, 5, 7
(`order_map` of AutoAWQ's WQLinear_GEMM). The weight is (number - zero) · scale. GPTQ's are packed as in `pack` of
AutoGPTQ's QuantLinear; a zero point of 15 less one, as v1 stores it, is 16 and not 0 (as in vLLM's q_gemm.cu). The
numbers and zero points of compressed-tensors are signed, and half of their range is added where they are packed.
"""

from collections.abc import Collection, Mapping

import torch
from torch import Tensor

from ...errors import CheckpointError, ConfigError
from ...kernels.grouped_weight import GroupedWeight
from ...kernels.quantized_weight import Fp8Weight, StoredWeight
from ..checkpoint.quantization import CompressedScheme, Fp8Scheme, GgufScheme, Int4Scheme, Scheme
from . import gguf
from .gguf import GgufReader
from .open import Reader

Shape = tuple[int, ...]

_FP8_SCALES = ("weight_scale_inv", "weight_scale")
_FP8_UNUSED = ("input_scale", "output_scale", "q_scale", "k_scale", "v_scale")  # of activations and the KV cache
_UNUSED = (
    "weight_shape", "input_scale", "input_zero_point", "input_global_scale", "output_scale", "q_scale", "k_scale",
    "v_scale",
)  # fmt: skip
# Of floats of 4 bits: twice the numbers, which are 0, ½, 1, 1½, 2, 3, 4, 6 and their negatives, and 12.
_E2M1 = (12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0)


def quantized_modules(scheme: Scheme, reader: Reader) -> set[str]:
    """The modules of the checkpoint whose weight is quantized, which is those with a scale."""
    names = reader.names()
    if isinstance(reader, GgufReader):
        return {
            name.removesuffix(".weight") for name in names if name.endswith(".weight") and reader.is_quantized(name)
        }
    leaves = ("qweight",) if isinstance(scheme, Int4Scheme) else _FP8_SCALES
    split = (name.rpartition(".") for name in names)
    return {module for module, _, leaf in split if leaf in leaves}


def tensors_of(scheme: Scheme, module: str, n: int, k: int, names: Collection[str]) -> Mapping[str, tuple[Shape, ...]]:
    """The tensors of a quantized module's weight [n, k]: name → the shapes it may have. names: all tensors of the
    checkpoint."""
    if isinstance(scheme, GgufScheme):
        return {f"{module}.weight": ((n, k),)}
    if isinstance(scheme, Fp8Scheme):
        scale = next(name for name in _FP8_SCALES if f"{module}.{name}" in names)
        blocks = () if scheme.block is None else ((-(-n // scheme.block[0]), -(-k // scheme.block[1])),)
        return {f"{module}.weight": ((n, k),), f"{module}.{scale}": (*blocks, (), (1,), (1, 1), (n, 1), (n,))}
    if isinstance(scheme, CompressedScheme):
        return _compressed_tensors(scheme, module, n, k, names)
    groups = k // (scheme.group_size or k)
    packed = (k, n // 8) if scheme.layout == "awq" else (k // 8, n)
    found: dict[str, tuple[Shape, ...]] = {
        f"{module}.qweight": (packed,),
        f"{module}.qzeros": ((groups, n // 8),),
        f"{module}.scales": ((groups, n),),
    }
    if f"{module}.g_idx" in names:
        found[f"{module}.g_idx"] = ((k,),)
    return found


def _compressed_tensors(
    scheme: CompressedScheme, module: str, n: int, k: int, names: Collection[str]
) -> Mapping[str, tuple[Shape, ...]]:
    groups, share = k // (scheme.group_size or k), 32 // scheme.bits
    scale: tuple[Shape, ...] = ((n, groups),)
    if scheme.group_size is None:
        scale = (*scale, (), (1,), (1, 1), (n,))
    zero = scale
    if scheme.format == "int-quantized":
        found: dict[str, tuple[Shape, ...]] = {f"{module}.weight": ((n, k),)}
    elif scheme.format == "pack-quantized":
        found = {f"{module}.weight_packed": ((n, -(-k // share)),)}
        zero = ((-(-n // share), groups),)
    else:
        packed, _ = _nvfp4_leaves(scheme)
        found = {f"{module}.{packed}": ((n, k // 2),)}
    found[f"{module}.weight_scale"] = scale
    if scheme.format.startswith("nvfp4"):
        _, whole = _nvfp4_leaves(scheme)
        found[f"{module}.{whole}"] = ((), (1,))
    if not scheme.is_symmetric:
        found[f"{module}.weight_zero_point"] = zero
    if f"{module}.weight_g_idx" in names:
        found[f"{module}.weight_g_idx"] = ((k,),)
    return found


def packed_bytes(scheme: Scheme, kind: str, n: int, k: int) -> int:
    """About the bytes of a weight [n, k] that the C kernels keep as it is. kind: its type, of a GGUF file."""
    if isinstance(scheme, Fp8Scheme):
        return n * (k + 4 * (1 if scheme.block is None else -(-k // scheme.block[1])))
    if isinstance(scheme, GgufScheme):
        return gguf.packed_bytes(kind, n, k)
    groups = k // (scheme.group_size or k)
    if isinstance(scheme, Int4Scheme):
        return n * (k // 2 + 3 * groups)
    return n * (k * scheme.bits // 8 + (2 if scheme.is_symmetric else 3) * groups)


def is_unused(scheme: Scheme, name: str) -> bool:
    """Whether a tensor of a quantized checkpoint is not needed for its weights."""
    leaf = name.rpartition(".")[2]
    if isinstance(scheme, CompressedScheme):
        return leaf in _UNUSED or (leaf == "weight_zero_point" and scheme.is_symmetric)
    return isinstance(scheme, Fp8Scheme) and leaf in _FP8_UNUSED


def read_weight(
    scheme: Scheme, reader: Reader, module: str, n: int, k: int, rows: tuple[int, int], columns: tuple[int, int]
) -> StoredWeight:
    """Some rows and columns of the weight of a module, [n, k] as a whole. Raises CheckpointError, and ConfigError if
    they would split weights that share a scale."""
    if isinstance(scheme, GgufScheme):
        assert isinstance(reader, GgufReader), "the scheme of a GGUF file"
        return reader.stored(f"{module}.weight", rows, columns)
    read = _Part(reader, module, rows, columns)
    if isinstance(scheme, Fp8Scheme):
        return _fp8(scheme, read, n, k)
    if isinstance(scheme, CompressedScheme):
        return _compressed(scheme, read, n, k)
    return _int4(scheme, read, k)


class _Part:
    """This rank's rows and columns of one module's tensors."""

    def __init__(self, reader: Reader, module: str, rows: tuple[int, int], columns: tuple[int, int]) -> None:
        self._reader = reader
        self.module = module
        self.rows = rows
        self.columns = columns

    def has(self, leaf: str) -> bool:
        return f"{self.module}.{leaf}" in self._reader

    def whole(self, leaf: str) -> Tensor:
        return self._reader.tensor(f"{self.module}.{leaf}")

    def tensor(self, leaf: str, first: slice, second: slice) -> Tensor:
        return self._reader.tensor(f"{self.module}.{leaf}", (first, second))

    def words(self, leaf: str, first: slice, second: slice) -> Tensor:
        """Of packed numbers: int32."""
        return _typed(self, leaf, self.tensor(leaf, first, second), torch.int32)

    def row_slice(self, share: int, n: int | None = None) -> slice:
        """The slice of rows that are stored or scaled `share` at a time. n: end, where the last share may be
        smaller."""
        return self._slice("rows", self.rows, share, n)

    def column_slice(self, share: int, k: int | None = None) -> slice:
        """The same for columns."""
        return self._slice("columns", self.columns, share, k)

    def _slice(self, what: str, part: tuple[int, int], share: int, end: int | None) -> slice:
        first, last = part
        if first % share or (last % share and last != end):
            raise ConfigError(
                f"{self.module} is quantized {share} {what} at a time, which a rank's part, {what} {first} to "
                f"{last}, would split; choose another --tensor-parallel-size."
            )
        return slice(first // share, -(-last // share))


def _fp8(scheme: Fp8Scheme, part: _Part, n: int, k: int) -> Fp8Weight:
    values = part.tensor("weight", slice(*part.rows), slice(*part.columns))
    if values.dtype != torch.float8_e4m3fn:
        kind = str(values.dtype).removeprefix("torch.")
        raise CheckpointError(f"{part.module}.weight has a scale, but its type is {kind} and not float8_e4m3fn.")
    scale = part.whole(next(leaf for leaf in _FP8_SCALES if part.has(leaf)))
    if not scale.is_floating_point():
        raise CheckpointError(
            f"{part.module} has scales of {str(scale.dtype).removeprefix('torch.')}, which are no floats."
        )
    scale = scale.float()
    if scheme.block is not None and scale.shape == (-(-n // scheme.block[0]), -(-k // scheme.block[1])):
        blocks = scale[part.row_slice(scheme.block[0], n), part.column_slice(scheme.block[1], k)]
        return Fp8Weight(values, blocks.contiguous(), scheme.block)
    each = scale.reshape(-1).expand(n)[slice(*part.rows)]
    return Fp8Weight(values, each.contiguous())


def _int4(scheme: Int4Scheme, part: _Part, k: int) -> GroupedWeight:
    n_first, n_last = part.rows
    eighths = part.row_slice(8)
    group = scheme.group_size or k
    groups = slice(0, 1) if scheme.group_size is None else part.column_slice(group)
    zeros = _unpack(part.words("qzeros", groups, eighths), scheme.layout) + scheme.zero_offset
    scales = part.tensor("scales", groups, slice(n_first, n_last)).float()
    if scheme.layout == "awq":
        numbers = _unpack(part.words("qweight", slice(*part.columns), eighths), "awq").t()
    else:
        words = part.words("qweight", part.column_slice(8), slice(n_first, n_last))
        numbers = _unpack(words.t(), "gptq")
    order = _order(part.whole("g_idx"), group, part, k) if part.has("g_idx") else None
    if order is not None:
        numbers = numbers[:, order.long()]
    return GroupedWeight(numbers.contiguous(), scales, scales * zeros, 4, order=order)


def _compressed(scheme: CompressedScheme, part: _Part, n: int, k: int) -> GroupedWeight:
    rows, half = slice(*part.rows), 1 << scheme.bits - 1
    group = scheme.group_size or k
    groups = slice(0, 1) if scheme.group_size is None else part.column_slice(group)
    if "fp4" in scheme.format:
        leaf, whole = _nvfp4_leaves(scheme)
        pairs = _typed(part, leaf, part.tensor(leaf, rows, part.column_slice(2)), torch.uint8)
        numbers = torch.stack((pairs & 15, pairs >> 4), dim=2).flatten(1)
        if scheme.format != "mxfp4-pack-quantized":
            return _nvfp4(part, numbers, rows, groups, whole)
        exponents = _typed(part, "weight_scale", part.tensor("weight_scale", rows, groups), torch.uint8)
        # The numbers of the table are twice those of the format.
        scales = exponents.t().contiguous().view(torch.float8_e8m0fnu).float() / 2
        return GroupedWeight(numbers, scales, 12 * scales, 4, table=_E2M1)
    scales = _per_row(part.whole("weight_scale"), n, rows, groups).float()
    zeros = torch.full((), half)
    if scheme.format == "int-quantized":
        stored = _typed(part, "weight", part.tensor("weight", rows, slice(*part.columns)), torch.int8)
        numbers = (stored.int() + half).to(torch.uint8)
        if not scheme.is_symmetric:
            zeros = _per_row(part.whole("weight_zero_point"), n, rows, groups).int() + half
    else:
        share = 32 // scheme.bits
        words = part.words("weight_packed", rows, part.column_slice(share, k))
        numbers = _unpack(words, bits=scheme.bits)[:, : part.columns[1] - part.columns[0]]
        if not scheme.is_symmetric:
            words = part.words("weight_zero_point", part.row_slice(share, n), groups)
            zeros = _unpack(words.t(), bits=scheme.bits)[:, : part.rows[1] - part.rows[0]]
    order = _order(part.whole("weight_g_idx"), group, part, k) if part.has("weight_g_idx") else None
    if order is not None:
        numbers = numbers[:, order.long()]
    return GroupedWeight(numbers.contiguous(), scales, scales * zeros, scheme.bits, order=order)


def _nvfp4_leaves(scheme: CompressedScheme) -> tuple[str, str]:
    """The last names of the packed numbers, and of the number that scales the whole weight."""
    return ("weight", "weight_scale_2") if scheme.format == "nvfp4" else ("weight_packed", "weight_global_scale")


def _nvfp4(part: _Part, numbers: Tensor, rows: slice, groups: slice, whole: str) -> GroupedWeight:
    narrow = _typed(part, "weight_scale", part.tensor("weight_scale", rows, groups), torch.float8_e4m3fn)
    of_whole = part.whole(whole).float().reshape(())
    narrow = narrow.t().contiguous().float()
    scales = narrow / of_whole if whole == "weight_global_scale" else narrow * of_whole
    factor = 1 / of_whole if whole == "weight_global_scale" else of_whole
    scales = scales / 2  # the numbers of the table are twice those of the format
    return GroupedWeight(numbers, scales, 12 * scales, 4, table=_E2M1, factor=factor.expand(len(numbers)).contiguous())


def _per_row(numbers: Tensor, n: int, rows: slice, groups: slice) -> Tensor:
    """[n, groups], or one number for all or for each row → [groups, rows] of this rank."""
    if numbers.dim() != 2 or numbers.shape[0] != n:
        numbers = numbers.reshape(-1).expand(n)[:, None]
    return numbers[rows, groups].t().contiguous()


def _typed(part: _Part, leaf: str, tensor: Tensor, dtype: torch.dtype) -> Tensor:
    if tensor.dtype != dtype:
        found, wanted = (str(each).removeprefix("torch.") for each in (tensor.dtype, dtype))
        raise CheckpointError(f"{part.module}.{leaf} has the type {found} and not {wanted}.")
    return tensor


def _unpack(words: Tensor, layout: str = "gptq", *, bits: int = 4) -> Tensor:
    """int32 [rows, columns / 8] → uint8 [rows, columns]; with 8 bits [rows, columns / 4]."""
    octets = words.contiguous().view(torch.uint8)  # of a word the lowest first
    numbers = octets if bits == 8 else torch.stack((octets & 15, octets >> 4), dim=2).flatten(1)
    if layout == "awq":
        numbers = numbers.view(words.shape[0], -1, 2, 4).transpose(2, 3).flatten(1)  # a word has the even columns first
    return numbers


def _order(groups: Tensor, size: int, part: _Part, k: int) -> Tensor | None:
    """The columns sorted by group; None if they already are."""
    groups = groups.long()
    if torch.equal(groups, torch.arange(k) // size):
        return None
    if not torch.equal(groups.sort().values, torch.arange(k) // size):
        raise CheckpointError(f"{part.module}.g_idx does not divide {k} columns into groups of {size}.")
    if part.columns != (0, k):
        raise ConfigError(
            f"{part.module} has its columns quantized in another order (desc_act), so ranks cannot divide them; "
            "omit --tensor-parallel-size."
        )
    return groups.argsort(stable=True).int()
