"""Products of activations with a layer's weights, with what can be done in the same launch."""

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from ...kernels.quantized_weight import Int4Weight, QuantizedWeight
from ...kernels.reference import TorchMatrix
from ...kernels.triton.fp8_product import fp8_product
from ...kernels.triton.int4_product import int4_product
from ...kernels.triton.product import product
from ...kernels.triton.rms_norm import rms_norm
from ...kernels.triton.silu_mul import silu_mul
from ...kernels.triton.small_product import MOST_ROWS, Workspace, small_product


class Norm(NamedTuple):
    """Of an RMSNorm."""

    weight: Tensor
    eps: float


class Product(Protocol):
    """A weight [n, k] and its bias, if it has one."""

    def __call__(
        self,
        x: Tensor,
        out: Tensor,
        *,
        norm: Norm | None = None,
        residual: Tensor | None = None,
        is_gated: bool = False,
    ) -> None:
        """out = [norm(x)] · weightᵀ [+ bias] [+ residual], or silu(gate) · up of it.

        x: [tokens, k]; out: [tokens, n], or [tokens, n / 2] of a weight whose even rows are gates and odd rows ups;
        residual: [tokens, n], may be out.
        """

    def fuses(self, tokens: int) -> bool:
        """Whether norm and residual cost no launch of their own for so many tokens."""


class DenseProduct:
    """See `Product`: few rows by a kernel of ours, which has no launch for norm and residual; many by cuBLAS."""

    def __init__(self, weight: Tensor, bias: Tensor | None, workspace: Workspace) -> None:
        self._weight, self._bias = weight, bias
        self._transposed = weight.t()
        self._workspace = workspace
        self._is_even = fits_small_product(weight)

    def fuses(self, tokens: int) -> bool:
        return tokens <= MOST_ROWS and self._is_even

    def __call__(
        self,
        x: Tensor,
        out: Tensor,
        *,
        norm: Norm | None = None,
        residual: Tensor | None = None,
        is_gated: bool = False,
    ) -> None:
        if self.fuses(x.shape[0]):
            small_product(
                x,
                self._weight,
                out,
                self._workspace,
                norm=norm,
                bias=self._bias,
                residual=residual,
                is_gated=is_gated,
            )
            return
        if norm is not None:
            x = _normed(x, norm)
        if is_gated or residual is not None:
            result = torch.empty((x.shape[0], self._weight.shape[0]), dtype=x.dtype, device=x.device)
            self._multiply(x, result)
            if residual is not None:
                torch.add(result, residual, out=out)
            else:
                silu_mul(result, out, interleaved=True)
        else:
            self._multiply(x, out)

    def _multiply(self, x: Tensor, out: Tensor) -> None:
        if self._bias is None:
            torch.mm(x, self._transposed, out=out)
        else:
            torch.addmm(self._bias, x, self._transposed, out=out)


class QuantizedProduct:
    """See `Product`: a weight of 8 or 4 bits, whatever the number of rows."""

    def __init__(self, weight: QuantizedWeight, bias: Tensor | None) -> None:
        self._weight, self._bias = weight, bias

    def fuses(self, tokens: int) -> bool:
        return False

    def __call__(
        self,
        x: Tensor,
        out: Tensor,
        *,
        norm: Norm | None = None,
        residual: Tensor | None = None,
        is_gated: bool = False,
    ) -> None:
        if norm is not None:
            x = _normed(x, norm)
        weight, bias = self._weight, self._bias
        if isinstance(weight, Int4Weight):
            int4_product(
                *(x, weight.packed, weight.scales, weight.zeros, out),
                half=weight.half,
                order=weight.order,
                bias=bias,
                residual=residual,
                is_gated=is_gated,
            )
            return
        fp8_product(
            *(x, weight.values, weight.scale, out),
            block=weight.block or (0, 0),
            bias=bias,
            residual=residual,
            is_gated=is_gated,
        )


class InvariantProduct:
    """See `Product`: a row's bits depend on nothing but that row, how many ever it comes with."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._weight, self._bias = weight, bias

    def fuses(self, tokens: int) -> bool:
        return False

    def __call__(
        self,
        x: Tensor,
        out: Tensor,
        *,
        norm: Norm | None = None,
        residual: Tensor | None = None,
        is_gated: bool = False,
    ) -> None:
        if norm is not None:
            x = _normed(x, norm)
        product(x, self._weight, out, bias=self._bias, residual=residual, is_gated=is_gated)


class InvariantMatrix(TorchMatrix):
    """A vocabulary whose logits are made by `InvariantProduct`."""

    def product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        out = torch.empty((x.shape[0], self.weight.shape[0]), dtype=x.dtype, device=x.device)
        InvariantProduct(self.weight, bias)(x, out)
        return out


def _normed(x: Tensor, norm: Norm) -> Tensor:
    normed = torch.empty_like(x)
    rms_norm(x, norm.weight, norm.eps, normed)
    return normed


def fits_small_product(weight: Tensor) -> bool:
    """Whether its rows are whole tiles."""
    return weight.shape[0] % 16 == 0


def interleave(x: Tensor) -> Tensor:
    """The rows of both halves of x in turn: gate 0, up 0, gate 1, …"""
    return torch.stack(x.chunk(2), dim=1).reshape(x.shape)
