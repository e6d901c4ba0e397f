"""Matrices of 2 to 8 bits, packed for the C kernels."""

import ctypes
from collections.abc import Sequence
from typing import Self

import torch
from torch import Tensor

from ..grouped_weight import GroupedWeight, narrowed, zero_points
from ..quantized_weight import Fp8Weight
from ..stored import OWN_MEMORY, Memory, Stored
from ..superblock_weight import SuperblockWeight, packed_bytes
from .dense import PADDED, PackedMatrix, num_groups
from .library import Kernels
from .limits import LANES
from .structs import MatrixFields

KIND_GROUPED, KIND_FP8, KIND_FP8_F32, KIND_SUPERBLOCKS, KIND_STACK = range(3, 8)  # of matrix.h
_STORED = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.uint8: 3}  # of matrix.h
_STORED_ONE = 4
_MAX_PARTS = 8  # of product.c
_MAX_GROUP = (2**31 - 1) // (255 * 127)  # columns whose products fit into 32 bits


class NativeGroupedMatrix(PackedMatrix):
    """A `GroupedWeight` [n, k]. Activations are rounded to 8 bits as `reference.round_activations` does."""

    lasting = ("_packed", "_scales", "_offsets", "_table", "_order")
    about = (*PackedMatrix.about, "_zero", "_bits", "_group")

    def __init__(
        self, kernels: Kernels, weight: GroupedWeight, *, is_gated: bool = False, memory: Memory = OWN_MEMORY
    ) -> None:
        """is_gated: the first half of the rows are gates, the second ups. Raises ValueError for groups that are too
        large."""
        n, k = weight.shape
        group, groups = weight.group_size, weight.scales.shape[0]
        if group > _MAX_GROUP:
            raise ValueError(f"a group of {group} columns is larger than the {_MAX_GROUP} that 32-bit sums allow")
        rows = _rows(n, is_gated=is_gated)
        unit = LANES * packed_columns(k, group) * weight.bits // 8
        numbers = weight.numbers.contiguous()

        def pack(piece: Tensor, first: int) -> None:
            last = first + piece.numel()
            kernels.grouped_pack(
                numbers.data_ptr(), piece.data_ptr(), n, k, group, weight.bits, int(is_gated),
                first // unit, last // unit,
            )  # fmt: skip

        self._packed = memory.filled(num_groups(n, is_gated=is_gated) * unit, torch.uint8, unit, pack)
        self._scales = _by_lane(narrowed(weight.scales), rows, groups)
        zeros = zero_points(weight)
        self._zero = 0 if zeros is None else int(zeros.flatten()[0])
        self._offsets: Tensor | None = None
        if zeros is None:
            self._offsets = _by_lane(narrowed(weight.offsets), rows, groups)
        elif (zeros != self._zero).any():
            self._offsets = _by_lane(zeros, rows, groups)
        self._table = None if weight.table is None else torch.tensor(weight.table, dtype=torch.uint8)
        self._order = None if weight.order is None else weight.order.int().contiguous()
        self._bits, self._group = weight.bits, group
        super().__init__(kernels, n, k, KIND_GROUPED, is_gated=is_gated)

    def fill(self, fields: MatrixFields) -> None:
        fields.w, fields.scales = self._packed.data_ptr(), self._scales.data_ptr()
        fields.scale_type, fields.zero = _STORED[self._scales.dtype], self._zero
        fields.offset_type = _STORED_ONE
        if self._offsets is not None:
            fields.offsets, fields.offset_type = self._offsets.data_ptr(), _STORED[self._offsets.dtype]
        if self._table is not None:
            fields.table = self._table.data_ptr()
        if self._order is not None:
            fields.order = self._order.data_ptr()
        fields.bits, fields.group = self._bits, self._group


class NativeSuperblockMatrix(PackedMatrix):
    """A `SuperblockWeight` [n, k]. Activations are rounded to 8 bits with a scale for each superblock."""

    about = (*PackedMatrix.about, "_bits")

    def __init__(self, kernels: Kernels, weight: SuperblockWeight, *, is_gated: bool = False) -> None:
        """is_gated: the first half of the rows are gates, the second ups."""
        n, k = weight.shape
        rows = 2 * (-(-n // 2 // LANES) * LANES) if is_gated else n
        self._packed = torch.empty(packed_bytes(weight.kind, rows, k), dtype=torch.uint8)
        self._bits = weight.form.bits
        blocks = weight.blocks.contiguous()
        kernels.superblocks_pack(blocks.data_ptr(), self._packed.data_ptr(), n, k, self._bits, int(is_gated))
        super().__init__(kernels, n, k, KIND_SUPERBLOCKS, is_gated=is_gated)

    def fill(self, fields: MatrixFields) -> None:
        fields.w, fields.bits = self._packed.data_ptr(), self._bits


class NativeFp8Matrix(PackedMatrix):
    """An `Fp8Weight` [n, k], which is unpacked a few rows at a time."""

    lasting = ("_packed", "_scales")
    about = (*PackedMatrix.about, "_group")

    def __init__(
        self,
        kernels: Kernels,
        weight: Fp8Weight,
        *,
        rounds: bool = False,
        is_gated: bool = False,
        memory: Memory = OWN_MEMORY,
    ) -> None:
        """rounds: weights are unpacked to bfloat16 and activations rounded to it; both are float32 otherwise.
        is_gated: the first half of the rows are gates, the second ups."""
        assert not weight.is_interleaved
        n, k = weight.shape
        rows = _rows(n, is_gated=is_gated)
        unit = LANES * (-(-k // PADDED) * PADDED)
        values = weight.values.contiguous()

        def pack(piece: Tensor, first: int) -> None:
            last = first + piece.numel()
            kernels.fp8_pack(
                values.data_ptr(), piece.data_ptr(), n, k, int(is_gated), first // unit, last // unit
            )  # fmt: skip

        self._packed = memory.filled(num_groups(n, is_gated=is_gated) * unit, torch.uint8, unit, pack)
        scales = weight.scale[None, :]
        self._group = k
        if weight.block is not None:
            scales = weight.scale.repeat_interleave(weight.block[0], dim=0)[:n].t()
            self._group = weight.block[1]
        self._scales = _by_lane(scales.float(), rows, scales.shape[0])
        super().__init__(kernels, n, k, KIND_FP8 if rounds else KIND_FP8_F32, is_gated=is_gated)

    def fill(self, fields: MatrixFields) -> None:
        fields.w, fields.scales, fields.group = self._packed.data_ptr(), self._scales.data_ptr(), self._group


_KINDS: tuple[type[PackedMatrix], ...] = (NativeGroupedMatrix, NativeSuperblockMatrix, NativeFp8Matrix)


class MatrixStack(PackedMatrix):
    """Matrices of different kinds that together are one: the rows of the first, then those of the second, and so on.
    Only for products."""

    def __init__(self, kernels: Kernels, parts: Sequence[PackedMatrix], *, is_gated: bool) -> None:
        """is_gated: the first half of the rows are gates, the second ups. The parts are not gated."""
        assert len(parts) <= _MAX_PARTS
        self._parts = tuple(parts)
        self._part_fields = (MatrixFields * len(parts))(*(part.fields(None) for part in parts))
        super().__init__(
            kernels, sum(part.shape[0] for part in parts), parts[0].shape[1], KIND_STACK, is_gated=is_gated
        )

    def fill(self, fields: MatrixFields) -> None:
        fields.parts, fields.num_parts = ctypes.addressof(self._part_fields), len(self._parts)

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self._parts)

    def stored(self) -> Stored:
        """The parts' tensors and fields, one part after the other; before a part's fields the name of its class."""
        parts = [part.stored() for part in self._parts]
        tensors = tuple(tensor for part in parts for tensor in part.tensors)
        fields = tuple(field for part in parts for field in (part.kind, *part.fields))
        return Stored(type(self).__name__, tensors, (self._is_gated, *fields))

    @classmethod
    def restored(cls, kernels: Kernels, parts: Stored) -> Self:
        is_gated, *fields = parts.fields
        tensors = list(parts.tensors)
        matrices: list[PackedMatrix] = []
        while fields:
            kind = next(kind for kind in _KINDS if kind.__name__ == fields[0])
            num_tensors, num_fields = len(kind.lasting), len(kind.about)
            part = Stored(kind.__name__, tuple(tensors[:num_tensors]), tuple(fields[1 : 1 + num_fields]))
            matrices.append(kind.restored(kernels, part))
            del tensors[:num_tensors], fields[: 1 + num_fields]
        return cls(kernels, matrices, is_gated=bool(is_gated))


def quantize(kernels: Kernels, weight: Tensor, bits: int, group_size: int) -> GroupedWeight:
    """`grouped_weight.quantize` by the C kernels: the same numbers. weight: float32 or bfloat16 [n, k]."""
    weight = weight if weight.dtype == torch.bfloat16 else weight.float()
    weight = weight.contiguous()
    n, k = weight.shape
    numbers = torch.empty((n, k), dtype=torch.uint8)
    scales, zeros = (torch.empty((k // group_size, n)) for _ in range(2))
    kernels.grouped_quantize(
        weight.data_ptr(), int(weight.dtype == torch.bfloat16), n, k, group_size, bits,
        numbers.data_ptr(), scales.data_ptr(), zeros.data_ptr(),
    )  # fmt: skip
    return GroupedWeight(numbers, scales, zeros.mul_(scales), bits)


def packed_columns(k: int, group: int) -> int:
    """The columns of a packed `GroupedWeight`, as in grouped.c: those of a group are padded."""
    to = 64 if group >= 64 else 8
    return k // group * (-(-group // to) * to)


def _rows(n: int, *, is_gated: bool) -> Tensor:
    """The row of the weight in each lane of the packed groups; n, which is no row, where there is none."""
    if not is_gated:
        lane = torch.arange(-(-n // LANES) * LANES)
        return lane.clamp(max=n)
    half = n // 2
    lane = torch.arange(-(-half // LANES) * LANES)
    gates = lane.masked_fill(lane >= half, n)
    ups = (lane + half).masked_fill(lane >= half, n)
    return torch.stack((gates.view(-1, LANES), ups.view(-1, LANES)), dim=1).flatten()


def _by_lane(each: Tensor, rows: Tensor, groups: int) -> Tensor:
    """[groups, n] → [lane groups, groups, 16], zero in lanes without a row."""
    padded = torch.cat((each, each.new_zeros(groups, 1)), dim=1)
    return padded[:, rows].view(groups, -1, LANES).transpose(0, 1).contiguous()
