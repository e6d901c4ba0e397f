"""silu(gate) · up of the two halves of a product, or of its even and odd columns.

`small_product.py` takes the weights of gate and up interleaved, so that one program owns both; a product of many rows
with the same weights then has its gates in the even columns. Rounding follows transformers: silu(gate) is rounded
before it is multiplied.
"""

import triton
import triton.language as tl
from torch import Tensor

from .activations import glu_of
from .dependent_launch import await_previous, dependent
from .variant import WIDE, Variant, shaped

_BLOCK = 1024


@triton.jit
def gated(gate, up, DTYPE: tl.constexpr):
    """silu(gate) · up. gate, up: float32 that hold values of type DTYPE; the result has type DTYPE."""
    return glu_of(gate, up, 0.0, 0.0, "silu", DTYPE)


@dependent
def _silu_mul(gate_up, out, dim, INTERLEAVED: tl.constexpr, BLOCK: tl.constexpr):
    await_previous()
    row = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * BLOCK
    columns = first + tl.arange(0, BLOCK)
    inside = columns < dim
    address = gate_up + row * 2 * dim
    if INTERLEAVED:
        pairs = 2 * first + tl.arange(0, 2 * BLOCK)
        both = tl.load(address + pairs, mask=pairs < 2 * dim, other=0.0).to(tl.float32)
        gate, up = tl.split(tl.reshape(both, (BLOCK, 2)))
    else:
        gate = tl.load(address + columns, mask=inside, other=0.0).to(tl.float32)
        up = tl.load(address + dim + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * dim + columns, gated(gate, up, gate_up.dtype.element_ty), mask=inside)


def silu_mul(gate_up: Tensor, out: Tensor, *, interleaved: bool) -> None:
    """gate_up: [tokens, 2 · dim] contiguous, the gates first or, if interleaved, in the even columns; out: [tokens,
    dim] contiguous, of the same type."""
    tokens, dim = out.shape
    assert gate_up.shape == (tokens, 2 * dim) and gate_up.is_contiguous() and out.is_contiguous(), gate_up.shape
    if tokens == 0:
        return
    grid = (tokens, triton.cdiv(dim, _BLOCK))
    _silu_mul[grid](gate_up, out, dim, INTERLEAVED=interleaved, BLOCK=_BLOCK, num_warps=4)


def _variant(dim: int, *, interleaved: bool) -> Variant:
    def launch(rows: int) -> None:
        silu_mul(shaped(rows, 2 * dim), shaped(rows, dim), interleaved=interleaved)

    name = "silu_mul bf16" + (" interleaved" if interleaved else "")
    return Variant(name=name, launch=launch, plans={"_silu_mul": WIDE})


# Every dimension that is a multiple of 16 gives the same kernel.
VARIANTS = tuple(_variant(3072, interleaved=interleaved) for interleaved in (False, True))
