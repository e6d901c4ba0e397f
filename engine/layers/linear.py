"""Matrix products. Several projections of one input are fused into one product with their rows stacked."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from ...kernels.ops import Matrix, Ops
from ...kernels.quantized_weight import QuantizedWeight, StoredWeight, concatenate
from ..parallel.collectives import Group


def parameter(*size: int) -> nn.Parameter:
    """A parameter without values. Models are built on the meta device; `registry.allocate` gives them memory."""
    return nn.Parameter(torch.empty(size), requires_grad=False)


def packed(
    ops: Ops, parts: Sequence[StoredWeight], dtype: torch.dtype, layout: Callable[[Tensor], Matrix], *, is_gated: bool
) -> Matrix:
    """A matrix of quantized parts for kernels that take them. Parts that are quantized differently, or that the kernels
    cannot represent, are dequantized to `dtype` for `layout`."""
    assert ops.quantized is not None, "the kernels take no quantized weights"
    try:
        return ops.quantized(concatenate(parts), is_gated)
    except ValueError:
        return layout(torch.cat([part.dequantize(dtype) for part in parts]))


class Weight(nn.Module):
    """A matrix [n, k]: a parameter while it is loaded, then the kernels' own representation."""

    is_gated = False  # only for `silu_mul`: the first half of the rows are gates, the second ups

    def __init__(self, n: int, k: int) -> None:
        super().__init__()
        self.shape = (n, k)
        self.weight: nn.Parameter | None = parameter(n, k)
        self.quantized: QuantizedWeight | None = None  # in place of the parameter
        self._matrix: Matrix | None = None

    @property
    def matrix(self) -> Matrix:
        assert self._matrix is not None, "used before `pack`"
        return self._matrix

    def pack(self, ops: Ops) -> None:
        """Passes the loaded values to the kernels and drops the parameter, so that there is no second copy. Not if
        `pack_quantized` did."""
        if self._matrix is None:
            self._matrix = self.layout(ops)(self.take())

    def pack_quantized(self, ops: Ops, parts: Sequence[StoredWeight]) -> None:
        """Passes a quantized weight to the kernels, in place of the parameter's values. parts: from the first rows to
        the last."""
        assert self.weight is not None, "packed twice"
        self._matrix = packed(ops, parts, self.weight.dtype, self.layout(ops), is_gated=self.is_gated)
        self.weight = None

    @property
    def matrices(self) -> tuple[Matrix, ...]:
        """What `pack` made. Set it to give the module matrices that were packed before, or to take them away."""
        return () if self._matrix is None else (self._matrix,)

    @matrices.setter
    def matrices(self, matrices: tuple[Matrix, ...]) -> None:
        self.weight = self.quantized = None
        (self._matrix,) = matrices or (None,)

    def take(self) -> Tensor:
        """The loaded values; the module gives them up."""
        assert self.weight is not None, "taken twice"
        values, self.weight = self.weight.data, None
        return values

    def replace(self, quantized: QuantizedWeight) -> None:
        """Stores a quantized weight and drops the parameter."""
        self.quantized, self.weight = quantized, None

    def layout(self, ops: Ops) -> Callable[[Tensor], Matrix]:
        """The kernels' constructor for the weight."""
        return ops.matrix


class Linear(Weight):
    """x · weightᵀ + bias. x: [tokens, in_size] → [tokens, out_size]."""

    def __init__(self, in_size: int, out_size: int, *, bias: bool, sum_over: Group | None = None) -> None:
        """sum_over: ranks that each hold some of the columns, so that their products have to be summed."""
        super().__init__(out_size, in_size)
        self.bias = parameter(out_size) if bias else None
        self._group = sum_over

    def forward(self, x: Tensor) -> Tensor:
        out = self.matrix.product(x, self.bias)
        if self._group is not None:
            self._group.all_reduce(out)
        return out


class GatedLinear(Linear):
    """silu(gate) · up of the product, whose first half of columns are gates. x: [tokens, in_size] → [tokens, out_size /
    2]."""

    is_gated = True

    def layout(self, ops: Ops) -> Callable[[Tensor], Matrix]:
        return ops.gated

    def forward(self, x: Tensor) -> Tensor:
        return self.matrix.silu_mul(x, self.bias)
