"""Products of activations with a layer's weights, and what their kernels fuse."""

from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn.functional import silu

from ...kernels.quantized_weight import Int4Weight, QuantizedWeight
from ...kernels.reference import TorchMatrix
from ...kernels.triton.fp8_product import fp8_product
from ...kernels.triton.int4_product import int4_product
from ...kernels.triton.product import product
from ...kernels.triton.silu_mul import silu_mul
from ...kernels.triton.small_product import MAX_ROWS, Workspace, small_product

Take = Callable[[tuple[int, ...], torch.dtype], Tensor]
"""Memory of this shape for one launch (`Scratch.take`)."""


class Norm(NamedTuple):
    weight: Tensor
    eps: float


class Product(Protocol):
    """A weight [n, k] and its bias, if it has one."""

    def __call__(self, x: Tensor, out: Tensor, *, is_gated: bool = False) -> None:
        """out = x · weightᵀ [+ bias], or silu(gate) · up of it.

        x: [tokens, k]; out: [tokens, n], or [tokens, n / 2] of a weight whose even rows are gates and odd rows ups.
        """

    def fused(self, tokens: int) -> "FusedProduct | None":
        """The fused form, if there is a kernel for this number of tokens."""

    def kernel(self, tokens: int, *, is_gated: bool) -> str:
        """The module of the kernel for this number of tokens; empty: torch computes."""


class FusedProduct(Protocol):
    """A `Product` with norm and residual in its launch."""

    def __call__(
        self,
        x: Tensor,
        out: Tensor,
        *,
        norm: Norm | None = None,
        residual: Tensor | None = None,
        is_gated: bool = False,
    ) -> None:
        """Takes norm(x), and adds the residual [tokens, n], which may be out."""


class DenseProduct:
    """Few rows use our kernel, many use cuBLAS."""

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None,
        workspace: Workspace,
        take: Take,
        without: frozenset[str] = frozenset(),
    ) -> None:
        """without: kernels that torch replaces."""
        self._weight, self._bias, self._take = weight, bias, take
        self._transposed = weight.t()
        self._workspace = workspace
        # The kernel has tiles of at least 16.
        self._has_kernel = weight.shape[0] % 16 == 0 and "small_product" not in without
        self._gates_in_torch = "silu_mul" in without

    def fused(self, tokens: int) -> FusedProduct | None:
        return self._small if tokens <= MAX_ROWS and self._has_kernel else None

    def kernel(self, tokens: int, *, is_gated: bool) -> str:
        if self.fused(tokens) is not None:
            return "small_product"
        return "silu_mul" if is_gated and not self._gates_in_torch else ""

    def __call__(self, x: Tensor, out: Tensor, *, is_gated: bool = False) -> None:
        if self.fused(x.shape[0]) is not None:
            self._small(x, out, is_gated=is_gated)
            return
        result = self._take((x.shape[0], self._weight.shape[0]), x.dtype) if is_gated else out
        if self._bias is None:
            torch.mm(x, self._transposed, out=result)
        else:
            torch.addmm(self._bias, x, self._transposed, out=result)
        if is_gated and self._gates_in_torch:
            torch.mul(silu(result[:, ::2]), result[:, 1::2], out=out)
        elif is_gated:
            silu_mul(result, out, interleaved=True)

    def _small(
        self,
        x: Tensor,
        out: Tensor,
        *,
        norm: Norm | None = None,
        residual: Tensor | None = None,
        is_gated: bool = False,
    ) -> None:
        small_product(
            x, self._weight, out, self._workspace, norm=norm, bias=self._bias, residual=residual, is_gated=is_gated
        )


class QuantizedProduct:
    """A weight of 8 or 4 bits, for any number of rows."""

    def __init__(self, weight: QuantizedWeight, bias: Tensor | None) -> None:
        self._weight, self._bias = weight, bias

    def fused(self, tokens: int) -> None:
        return None

    def kernel(self, tokens: int, *, is_gated: bool) -> str:
        return "int4_product" if isinstance(self._weight, Int4Weight) else "fp8_product"

    def __call__(self, x: Tensor, out: Tensor, *, is_gated: bool = False) -> None:
        weight, bias = self._weight, self._bias
        if isinstance(weight, Int4Weight):
            numbers = (weight.packed, weight.scales, weight.zeros)
            int4_product(x, *numbers, out, half=weight.half, order=weight.order, bias=bias, is_gated=is_gated)
        else:
            block = weight.block or (0, 0)
            fp8_product(x, weight.values, weight.scale, out, block=block, bias=bias, is_gated=is_gated)


class InvariantProduct:
    """A row's bits depend on that row alone, whatever the number of rows."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._weight, self._bias = weight, bias

    def fused(self, tokens: int) -> None:
        return None

    def kernel(self, tokens: int, *, is_gated: bool) -> str:
        return "product"

    def __call__(self, x: Tensor, out: Tensor, *, is_gated: bool = False) -> None:
        product(x, self._weight, out, bias=self._bias, is_gated=is_gated)


class InvariantMatrix(TorchMatrix):
    """A vocabulary matrix whose logits come from `InvariantProduct`."""

    def product(self, x: Tensor, bias: Tensor | None, out: Tensor | None = None) -> Tensor:
        if out is None:
            out = torch.empty((x.shape[0], self.weight.shape[0]), dtype=x.dtype, device=x.device)
        InvariantProduct(self.weight, bias)(x, out)
        return out


def interleave(x: Tensor) -> Tensor:
    """Interleaves the rows of both halves of x: gate 0, up 0, gate 1, …"""
    return torch.stack(x.chunk(2), dim=1).reshape(x.shape)
