"""Products of activations with a layer's weights, and what their kernels fuse."""

from collections.abc import Callable
from functools import cache
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn.functional import silu

from ...kernels.quantized_weight import Fp8Weight, Int4Weight, Int8Weight, QuantizedWeight
from ...kernels.reference import TorchMatrix
from ...kernels.triton.product import Workspace, product
from ...kernels.triton.quantized_product import quantized_product
from ...kernels.triton.round_rows import round_rows, scale_sums
from ...kernels.triton.silu_mul import silu_mul
from ...kernels.triton.small_product import MAX_ROWS, small_product
from ...kernels.triton.widen import widen

MAX_NARROW_ROWS = 256
"""More are bound by multiplication, not by reading the weight: they take a library's product, with weights widened
before or with activations of 8 bits."""

Take = Callable[[tuple[int, ...], torch.dtype], Tensor]
"""Memory of this shape for one launch (`Scratch.take`, or `fresh`)."""


def fresh(device: torch.device) -> Take:
    """New memory."""
    return lambda shape, dtype: torch.empty(shape, dtype=dtype, device=device)


class Norm(NamedTuple):
    weight: Tensor
    eps: float


class Product(Protocol):
    """A weight [n, k] and its bias, if it has one."""

    def __call__(self, x: Tensor, out: Tensor, *, is_gated: bool = False) -> None:
        """out = x · weightᵀ [+ bias], or silu(gate) · up of it.

        x: [tokens, k]; out: [tokens, n], or [tokens, n / 2] of a weight whose even rows are gates and odd rows ups; of
        x's type or, without gates, float32.
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
        else:
            _by_library(
                x, self._transposed, self._bias, out, self._take, is_gated=is_gated, gates_in_torch=self._gates_in_torch
            )

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
    """A weight of 8 or 4 bits. Few rows use our kernel, many use a library's."""

    def __init__(
        self,
        weight: QuantizedWeight,
        bias: Tensor | None,
        workspace: Workspace,
        take: Take,
        *,
        dtype: torch.dtype,
        has_narrow_inputs: bool = False,
        without: frozenset[str] = frozenset(),
    ) -> None:
        """dtype: of activations. has_narrow_inputs: the weight was made for activations of 8 bits, which the products
        of many rows then have, where there is a library for them. without: kernels that torch replaces."""
        self._weight, self._bias, self._workspace, self._take = weight, bias, workspace, take
        self._order = weight.order if isinstance(weight, Int4Weight | Int8Weight) else None
        self._gates_in_torch = "silu_mul" in without
        self._narrow: NarrowProduct | None = None
        if has_narrow_inputs and "round_rows" not in without:
            self._narrow = narrow_product(weight, bias, dtype, gates_in_torch=self._gates_in_torch)

    def taken(self, tokens: int, itemsize: int, *, is_gated: bool) -> tuple[int, ...]:
        """Bytes of each tensor that a call with so many tokens takes."""
        n, k = self._weight.shape
        if tokens <= MAX_NARROW_ROWS or self._narrow is not None:
            return ()
        results, inputs = (n if is_gated else 0), (0 if self._order is None else k)
        return n * k * itemsize, tokens * results * itemsize, tokens * inputs * itemsize

    def left_to_torch(self, itemsize: int) -> int:
        """Bytes per token that a call of many tokens takes from the allocator."""
        n, k = self._weight.shape
        ordered = 0 if self._order is None else k * itemsize  # by `quantized_product`
        return ordered if self._narrow is None else k + 4 + n * max(4, 2 * itemsize)

    def fused(self, tokens: int) -> FusedProduct | None:
        return self._small if tokens <= MAX_ROWS else None

    def kernel(self, tokens: int, *, is_gated: bool) -> str:
        if tokens <= MAX_NARROW_ROWS:
            return "quantized_product"
        return "widen" if self._narrow is None else "round_rows"

    def __call__(self, x: Tensor, out: Tensor, *, is_gated: bool = False) -> None:
        if x.shape[0] <= MAX_NARROW_ROWS:
            self._small(x, out, is_gated=is_gated)
        elif self._narrow is not None:
            self._narrow(x, out, is_gated)
        else:
            self._widened(x, out, is_gated=is_gated)

    def _small(
        self,
        x: Tensor,
        out: Tensor,
        *,
        norm: Norm | None = None,
        residual: Tensor | None = None,
        is_gated: bool = False,
    ) -> None:
        quantized_product(
            x, self._weight, out, self._workspace, norm=norm, bias=self._bias, residual=residual, is_gated=is_gated
        )

    def _widened(self, x: Tensor, out: Tensor, *, is_gated: bool) -> None:
        weight = self._take(tuple(self._weight.shape), x.dtype)
        widen(self._weight, weight)
        if self._order is not None:
            x = torch.index_select(x, 1, self._order, out=self._take(tuple(x.shape), x.dtype))
        _by_library(x, weight.t(), self._bias, out, self._take, is_gated=is_gated, gates_in_torch=self._gates_in_torch)


NarrowProduct = Callable[[Tensor, Tensor, bool], None]
"""x, out, is_gated, as of a `Product`."""


def narrow_product(
    weight: QuantizedWeight, bias: Tensor | None, dtype: torch.dtype, *, gates_in_torch: bool = False
) -> NarrowProduct | None:
    """A product in which each row of activations is rounded to 8 bits; None: this weight or device has none."""
    n, k = weight.shape
    if n % 16 or k % 16 or not isinstance(weight, Fp8Weight | Int8Weight):
        return None
    if isinstance(weight, Int8Weight):
        values, scales = weight.values.t(), weight.scales[0]
        if len(weight.scales) > 1 or weight.order is not None or not _multiplies_int8(values.device):
            return None

        def by_integers(x: Tensor, out: Tensor, is_gated: bool) -> None:
            codes, of_rows = round_rows(x, torch.int8)
            scale_sums(torch._int_mm(codes, values), of_rows, scales, out, bias=bias, is_gated=is_gated)

        return by_integers
    codes_of_weight, of_columns = weight.values.t(), weight.scale[None, :]
    if weight.block is not None or not _multiplies_fp8(codes_of_weight.device, dtype):
        return None

    def by_floats(x: Tensor, out: Tensor, is_gated: bool) -> None:
        codes, of_rows = round_rows(x, torch.float8_e4m3fn)
        result = scaled_mm(codes, codes_of_weight, of_rows[:, None], of_columns, x.dtype)
        if bias is not None:
            result += bias
        if is_gated:
            _gate(result, out, in_torch=gates_in_torch)
        else:
            out.copy_(result)

    return by_floats


def scaled_mm(x: Tensor, weight: Tensor, of_rows: Tensor, of_columns: Tensor, dtype: torch.dtype) -> Tensor:
    """x · weight of float8_e4m3fn, times a scale for each row [rows, 1] and column [1, n]. weight: [k, n], with columns
    in memory."""
    return torch._scaled_mm(x, weight, scale_a=of_rows, scale_b=of_columns, out_dtype=dtype, use_fast_accum=False)


@cache
def _multiplies_fp8(device: torch.device, dtype: torch.dtype) -> bool:
    zeros, ones = torch.zeros((32, 32), device=device).to(torch.float8_e4m3fn), torch.ones((32, 1), device=device)
    return _runs(lambda: scaled_mm(zeros, zeros.t(), ones, ones.t(), dtype))


@cache
def _multiplies_int8(device: torch.device) -> bool:
    zeros = torch.zeros((32, 32), dtype=torch.int8, device=device)
    return _runs(lambda: torch._int_mm(zeros, zeros.t()))


@cache
def _sums_wide(device: torch.device, dtype: torch.dtype) -> bool:
    zeros = torch.zeros((32, 32), dtype=dtype, device=device)
    return _runs(lambda: torch.mm(zeros, zeros, out_dtype=torch.float32))


def _runs(call: Callable[[], Tensor]) -> bool:
    """Whether torch has the operation on this device, which it says only by an exception."""
    try:
        call()
    except (RuntimeError, TypeError, ValueError):
        return False
    return True


def _by_library(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    out: Tensor,
    take: Take,
    *,
    is_gated: bool,
    gates_in_torch: bool = False,
) -> None:
    """weight: [k, n]; the rest as of a `Product`."""
    if out.dtype != x.dtype:
        if _sums_wide(x.device, x.dtype):
            torch.mm(x, weight, out_dtype=out.dtype, out=out)
        else:
            out.copy_(torch.mm(x, weight, out=take(tuple(out.shape), x.dtype)))
        if bias is not None:
            out += bias
        return
    result = take((x.shape[0], weight.shape[1]), x.dtype) if is_gated else out
    if bias is None:
        torch.mm(x, weight, out=result)
    else:
        torch.addmm(bias, x, weight, out=result)
    if is_gated:
        _gate(result, out, in_torch=gates_in_torch)


def _gate(x: Tensor, out: Tensor, *, in_torch: bool) -> None:
    """out = silu(gate) · up of the even and odd columns of x."""
    if in_torch:
        torch.mul(silu(x[:, ::2]), x[:, 1::2], out=out)
    else:
        silu_mul(x, out, interleaved=True)


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


class ProductMatrix(TorchMatrix):
    """A vocabulary matrix with a `Product` of its own."""

    def __init__(
        self, weight: Tensor, product: Product, dtype: torch.dtype | None, in_scratch: Product | None = None
    ) -> None:
        """product: of the weight, without bias. dtype: of results; float32 logits are never rounded. None: as the
        activations. in_scratch: the product for results in given memory, if it takes temporary memory elsewhere."""
        super().__init__(weight)
        self._product, self._in_scratch, self._dtype = product, in_scratch or product, dtype

    def result_dtype(self, x: Tensor) -> torch.dtype:
        return self._dtype or x.dtype

    def product(self, x: Tensor, bias: Tensor | None, out: Tensor | None = None) -> Tensor:
        if out is None:
            out = torch.empty((x.shape[0], self.weight.shape[0]), dtype=self.result_dtype(x), device=x.device)
            self._product(x, out)
        else:
            self._in_scratch(x, out)
        return out if bias is None else out.add_(bias)
