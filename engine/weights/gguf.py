"""The tensors of a GGUF file under the names that safetensors have, and how their quantized types are decoded.

A type's values lie in blocks of 32 or 256 adjacent columns (ggml's ggml-common.h and ggml-quants.c). Those of 256, Q2_K
to Q6_K, become a `SuperblockWeight` as they are. The others become a `GroupedWeight`: numbers without sign, and a scale
and an offset for each group of 32 columns, weight = scale · number - offset:

    Q8_0        d, 32 signed bytes                    scale d, offset 128·d (the number is the byte + 128)
    Q4_0, Q5_0  d, numbers of 4 or 5 bits             scale d, offset 8·d or 16·d
    Q4_1, Q5_1  d, m, numbers                         scale d, offset -m

A part of the columns that splits a superblock becomes a `GroupedWeight` in any case, with groups of 16 or 32 columns.

The rows of q and k are in another order in files of Llama's architecture, because llama.cpp's rotary embedding turns
adjacent pairs there: row 2·j + half of a head is row half · dim / 2 + j of the original, which is restored here.
"""

import os
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...config.model_files import open_file
from ...errors import CheckpointError, ConfigError
from ...kernels import superblock_weight
from ...kernels.grouped_weight import GroupedWeight
from ...kernels.superblock_weight import COLUMNS, FORMS, SuperblockWeight
from ..checkpoint.gguf import PLAIN, TYPES, GgufTensor, read_gguf

_Bytes = NDArray[np.integer[Any]]
_Floats = NDArray[np.floating[Any]]
_BLOCK = {name: (values, num_bytes) for name, values, num_bytes in TYPES.values()}
_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}

# Of a layer: GGUF's module → the checkpoint's. Experts are one tensor each for all gates, ups and downs.
_MODULES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_OUTSIDE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_EXPERTS = {  # of GGUF's architecture: the router, and the matrices of an expert
    "llama": {
        "ffn_gate_inp": "block_sparse_moe.gate",
        "ffn_gate_exps": "block_sparse_moe.experts.{}.w1",
        "ffn_up_exps": "block_sparse_moe.experts.{}.w3",
        "ffn_down_exps": "block_sparse_moe.experts.{}.w2",
    },
    "qwen3moe": {
        "ffn_gate_inp": "mlp.gate",
        "ffn_gate_exps": "mlp.experts.{}.gate_proj",
        "ffn_up_exps": "mlp.experts.{}.up_proj",
        "ffn_down_exps": "mlp.experts.{}.down_proj",
    },
}
_MAX_EXPERTS = 2**12
# Read with the config: scaled frequencies of the rotary embedding.
_NOT_WEIGHTS = ("rope_freqs.weight",)


@dataclass(frozen=True)
class _Source:
    """Where one of the checkpoint's tensors lies: a whole tensor of the file, or one expert's part of it."""

    tensor: GgufTensor
    expert: int | None = None
    num_heads: int | None = None  # of q and k of Llama: restore the order of the rows

    @property
    def shape(self) -> tuple[int, ...]:
        return self.tensor.shape if self.expert is None else self.tensor.shape[1:]


class GgufReader:
    """The tensors of one model by the names that its safetensors have. A context manager; tensors are read on demand
    and not kept. The interface is that of `CheckpointReader`."""

    def __init__(self, path: Path) -> None:
        """Raises CheckpointError."""
        gguf = read_gguf(path, has_vocabulary=False)
        self._stack = ExitStack()
        self._files = {part: self._stack.enter_context(_opened(part)) for part in gguf.parts}
        arch = gguf.metadata.text("general.architecture") or ""
        heads = gguf.metadata.integer(f"{arch}.attention.head_count")
        kv_heads = gguf.metadata.integer(f"{arch}.attention.head_count_kv") or heads
        turned = {"attn_q": heads, "attn_k": kv_heads} if arch == "llama" else {}
        self._sources: dict[str, _Source] = {}
        for name, tensor in gguf.tensors.items():
            if name not in _NOT_WEIGHTS:
                self._sources.update(_sources(name, tensor, arch, turned))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes the files; no tensor can be read afterwards."""
        self._stack.close()

    def __contains__(self, name: str) -> bool:
        return name in self._sources

    def names(self) -> list[str]:
        """All tensors, in the order of the files; those that the model does not know keep the file's names."""
        return list(self._sources)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._sources[name].shape

    def dtype(self, name: str) -> str:
        """The file's name of the type, such as BF16 or Q4_K."""
        return self._sources[name].tensor.type

    def num_bytes(self, name: str) -> int:
        """Bytes of the tensor in the file."""
        source = self._sources[name]
        return source.tensor.num_bytes // (1 if source.expert is None else source.tensor.shape[0])

    def is_quantized(self, name: str) -> bool:
        return self.dtype(name) not in PLAIN

    def tensor(self, name: str, part: slice | tuple[slice, slice] | None = None) -> Tensor:
        """The tensor on the CPU, in the file's dtype, or in float32 if it is quantized; with `part` only that. Raises
        CheckpointError."""
        source = self._sources[name]
        rows, columns = part if isinstance(part, tuple) else (part or slice(None), slice(None))
        if self.is_quantized(name):
            return (
                self._whole_rows(name, rows)
                .dequantize(torch.float32)[:, columns]
                .reshape(_cut(source.shape, rows, columns))
            )
        dtype = _DTYPES[source.tensor.type]
        first, last, _ = rows.indices(source.shape[0])
        data = self._rows(name, first, last).view(dtype)
        tensor = data.view(last - first, *source.shape[1:])
        return tensor if columns == slice(None) else tensor[:, columns]

    def stored(self, name: str, rows: tuple[int, int], columns: tuple[int, int]) -> GroupedWeight | SuperblockWeight:
        """These rows and columns of a quantized matrix. Raises CheckpointError, and ConfigError if the columns would
        split a group."""
        weight = self._whole_rows(name, slice(*rows))
        size = weight.group_size
        if columns == (0, weight.shape[1]):
            return weight
        if columns[0] % size or columns[1] % size:
            raise ConfigError(
                f"{name} is quantized {size} columns at a time, which a rank's part, columns {columns[0]} to "
                f"{columns[1]}, would split; choose another --tensor-parallel-size."
            )
        if isinstance(weight, SuperblockWeight):
            if not columns[0] % COLUMNS and not columns[1] % COLUMNS:
                first, last = (column // COLUMNS * weight.form.num_bytes for column in columns)
                return SuperblockWeight(weight.kind, weight.blocks[:, first:last].contiguous())
            weight = weight.grouped()
        groups = slice(columns[0] // size, columns[1] // size)
        return GroupedWeight(
            weight.numbers[:, slice(*columns)].contiguous(),
            weight.scales[groups].contiguous(),
            weight.offsets[groups].contiguous(),
            weight.bits,
        )

    def _whole_rows(self, name: str, rows: slice) -> GroupedWeight | SuperblockWeight:
        source = self._sources[name]
        n = source.shape[0] if len(source.shape) > 1 else 1
        first, last, _ = rows.indices(n)
        weight = decode(source.tensor.type, self._rows(name, first, last), last - first)
        if isinstance(weight, SuperblockWeight):
            is_finite = weight.is_finite()
        else:
            is_finite = bool(weight.scales.isfinite().all() and weight.offsets.isfinite().all())
        if not is_finite:
            raise CheckpointError(f"{source.tensor.file} is damaged: {name} has scales that are not finite.")
        return weight

    def _rows(self, name: str, first: int, last: int) -> Tensor:
        """The bytes of rows as the file has them, uint8 [rows, bytes of a row], in the original's order."""
        source = self._sources[name]
        tensor = source.tensor
        n = source.shape[0]
        is_row = tensor.type not in PLAIN and len(source.shape) == 1  # a vector of blocks is one row
        n = 1 if is_row else n
        size = tensor.num_bytes // n // (1 if source.expert is None else tensor.shape[0])
        begin = tensor.offset + (source.expert or 0) * n * size
        order = None if source.num_heads is None else _original_rows(name, n, source.num_heads)[first:last]
        if order is None or last <= first:
            return self._read(tensor, begin + first * size, last - first, size)
        low, high = int(order.min()), int(order.max()) + 1
        return self._read(tensor, begin + low * size, high - low, size)[order - low]

    def _read(self, tensor: GgufTensor, offset: int, num_rows: int, row_bytes: int) -> Tensor:
        """Not mapped: a file that is cut short meanwhile would end the process."""
        data = np.empty(num_rows * row_bytes, np.uint8)
        view, done = data.data, 0
        while done < data.nbytes:
            try:
                count = os.preadv(self._files[tensor.file].fd, [view[done:]], offset + done)
            except OSError as error:
                raise CheckpointError(f"{tensor.file} cannot be read: {error.strerror}.") from None
            if not count:
                raise CheckpointError(f"{tensor.file} was cut short while it was read.")
            done += count
        return torch.from_numpy(data).view(num_rows, row_bytes)


class _opened:
    """An open file's descriptor."""

    def __init__(self, path: Path) -> None:
        try:
            self.fd = open_file(path)
        except FileNotFoundError:
            raise CheckpointError(f"{path} is missing.") from None
        except ConfigError as error:
            raise CheckpointError(str(error)) from None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self.fd)


def _sources(name: str, tensor: GgufTensor, arch: str, turned: Mapping[str, int | None]) -> dict[str, _Source]:
    """The checkpoint's names of a tensor of the file; its own name if it has none."""
    module, _, leaf = name.rpartition(".")
    if module in _OUTSIDE:
        return {f"{_OUTSIDE[module]}.{leaf}": _Source(tensor)}
    block, _, rest = module.partition(".")
    layer, _, module = rest.partition(".")
    prefix = f"model.layers.{layer}"
    if block == "blk" and layer.isdecimal():
        if module in _MODULES:
            return {f"{prefix}.{_MODULES[module]}.{leaf}": _Source(tensor, num_heads=turned.get(module))}
        ours = _EXPERTS.get(arch, {}).get(module)
        if ours is not None and "{}" not in ours:
            return {f"{prefix}.{ours}.{leaf}": _Source(tensor)}
        if ours is not None and len(tensor.shape) == 3 and tensor.shape[0] <= _MAX_EXPERTS:
            return {f"{prefix}.{ours.format(i)}.{leaf}": _Source(tensor, i) for i in range(tensor.shape[0])}
    return {name: _Source(tensor)}


def _original_rows(name: str, n: int, num_heads: int) -> Tensor:
    """The file's row of each row of the original."""
    if num_heads < 1 or n % (2 * num_heads):
        raise CheckpointError(f"{name} has {n} rows, which are not {num_heads} heads of pairs.")
    return torch.arange(n).view(num_heads, n // num_heads // 2, 2).transpose(1, 2).reshape(-1)


def _cut(shape: tuple[int, ...], rows: slice, columns: slice) -> tuple[int, ...]:
    return tuple(len(range(*part.indices(size))) for part, size in zip((rows, columns), shape, strict=False))


# ── types ──────────────────────────────────────────────────────────────────────────────────────────────


def decode(kind: str, rows: Tensor, num_rows: int) -> GroupedWeight | SuperblockWeight:
    """A quantized matrix of the type `kind`. rows: uint8 [num_rows, bytes], whole blocks."""
    if kind in FORMS:
        return SuperblockWeight(kind, rows.view(num_rows, -1))
    _, num_bytes = _BLOCK[kind]
    with np.errstate(invalid="ignore"):  # scales that are not finite
        numbers, scales, offsets = _DECODERS[kind](rows.numpy().reshape(-1, num_bytes))
    scale, offset = (torch.from_numpy(each.reshape(num_rows, -1).T.copy()) for each in (scales, offsets))
    values = torch.from_numpy(np.ascontiguousarray(numbers.reshape(num_rows, -1)))
    return GroupedWeight(values, scale, offset, 4 if kind in _FOUR_BITS else 8)


def packed_bytes(kind: str, n: int, k: int) -> int:
    """The bytes of a matrix [n, k] of the type `kind` as the C kernels keep it."""
    if kind in FORMS:
        return superblock_weight.packed_bytes(kind, n, k)
    per_group = 2 if kind.endswith("_0") else 4  # a float16 scale, and an offset where it is no multiple of the scale
    return n * (k * (4 if kind in _FOUR_BITS else 8) // 8 + per_group * (k // 32))


_Decoded = tuple[_Bytes, _Floats, _Floats]
"""Of b blocks: numbers [b, 32], scales [b, 1] and offsets [b, 1]."""


def _halves(data: _Bytes) -> _Bytes:
    """[b, bytes] → [b, bytes]·2: the low halves, then the high ones."""
    return np.concatenate((data & 15, data >> 4), axis=1)


def _float16(data: _Bytes) -> _Floats:
    return np.ascontiguousarray(data).view("<f2").astype(np.float32)


def _q8_0(blocks: _Bytes) -> _Decoded:
    d = _float16(blocks[:, :2])
    return blocks[:, 2:] ^ 0x80, d, 128 * d


def _q4_0(blocks: _Bytes) -> _Decoded:
    d = _float16(blocks[:, :2])
    return _halves(blocks[:, 2:]), d, 8 * d


def _q4_1(blocks: _Bytes) -> _Decoded:
    return _halves(blocks[:, 4:]), _float16(blocks[:, :2]), -_float16(blocks[:, 2:4])


def _q5_0(blocks: _Bytes) -> _Decoded:
    d = _float16(blocks[:, :2])
    return _halves(blocks[:, 6:]) | _fifth_bits(blocks[:, 2:6]), d, 16 * d


def _q5_1(blocks: _Bytes) -> _Decoded:
    numbers = _halves(blocks[:, 8:]) | _fifth_bits(blocks[:, 4:8])
    return numbers, _float16(blocks[:, :2]), -_float16(blocks[:, 2:4])


def _fifth_bits(data: _Bytes) -> _Bytes:
    return np.unpackbits(data.astype(np.uint8), axis=1, bitorder="little") << 4


_DECODERS: dict[str, Callable[[_Bytes], _Decoded]] = {
    "Q8_0": _q8_0,
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
}
_FOUR_BITS = ("Q4_0", "Q4_1")
