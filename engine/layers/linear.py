"""Matrix products. Several projections of one input are fused into one product, their rows one below the other."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from ...kernels.ops import Matrix, Ops
from ...kernels.quantized_weight import QuantizedWeight
from ..parallel.collectives import Group


def parameter(*size: int) -> nn.Parameter:
    """Without values. Models are laid out on the meta device and get their memory from `registry.allocate`."""
    return nn.Parameter(torch.empty(size), requires_grad=False)


class Weight(nn.Module):
    """A matrix [n, k]: a parameter until it is loaded, then whatever the kernels make of it."""

    def __init__(self, n: int, k: int) -> None:
        super().__init__()
        self.shape = (n, k)
        self.weight: nn.Parameter | None = parameter(n, k)
        self.quantized: QuantizedWeight | None = None  # instead of the parameter, where kernels read it as it is
        self._matrix: Matrix | None = None

    @property
    def matrix(self) -> Matrix:
        assert self._matrix is not None, "used before `pack`"
        return self._matrix

    def pack(self, ops: Ops) -> None:
        """Hands the loaded values to the kernels; the parameter goes, so that there is no second copy."""
        self._matrix = self.layout(ops)(self.take())

    def take(self) -> Tensor:
        """The loaded values, which are the caller's from now on."""
        assert self.weight is not None, "taken twice"
        values, self.weight = self.weight.data, None
        return values

    def replace(self, quantized: QuantizedWeight) -> None:
        """Takes what a checkpoint has instead of the parameter, which goes."""
        self.quantized, self.weight = quantized, None

    def layout(self, ops: Ops) -> Callable[[Tensor], Matrix]:
        """What becomes of the weight."""
        return ops.matrix


class Linear(Weight):
    """x · weightᵀ + bias. x: [tokens, in_size] → [tokens, out_size]."""

    def __init__(self, in_size: int, out_size: int, *, bias: bool, sum_over: Group | None = None) -> None:
        """`sum_over`: ranks that each hold some of the columns, so that the product is the sum of theirs."""
        super().__init__(out_size, in_size)
        self.bias = parameter(out_size) if bias else None
        self._group = sum_over

    def forward(self, x: Tensor) -> Tensor:
        out = self.matrix.product(x, self.bias)
        if self._group is not None:
            self._group.all_reduce(out)
        return out
