"""Activations, alone or as the gate of a second operand.

Rounding follows transformers: the gate's activation is rounded to the type of the activations before it is multiplied.
"""

import triton
import triton.language as tl
from torch import Tensor

from .variant import WIDE, Variant, shaped

_BLOCK = 1024


@triton.jit
def activation(x, ACT: tl.constexpr):
    """x: float32. ACT: an `Activation` without weights that needs no gate."""
    if ACT == "silu":
        x = x * tl.sigmoid(x)
    elif ACT == "gelu":
        x = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif ACT == "gelu_tanh":  # 1 + tanh(u) = 2 · sigmoid(2 · u)
        x = x * tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
    elif ACT == "quick_gelu":
        x = x * tl.sigmoid(1.702 * x)
    elif ACT == "relu":
        x = tl.where(x < 0, 0.0, x)  # a NaN stays one
    elif ACT == "relu2":
        x = tl.where(x < 0, 0.0, x * x)
    else:
        tl.static_assert(ACT == "tanh")
        power = tl.exp(-2.0 * tl.abs(x))
        far = (1.0 - power) / (1.0 + power)
        near = x * (1.0 - x * x * (0.3333333333333333 - 0.13333333333333333 * x * x))  # where `far` cancels
        x = tl.where(tl.abs(x) < 0.03, near, tl.where(x < 0, -far, far))
    return x


@triton.jit
def xielu(x, positive, negative):
    """The integral of an ELU (arXiv 2411.13010). x: float32; positive, negative: factors of these numbers."""
    least = tl.minimum(x, -1e-6)
    near = least * least * (0.5 + least * (1 / 6 + least * (1 / 24 + least * (1 / 120 + least * (1 / 720)))))
    curve = tl.where(least > -0.25, near, tl.exp(least) - 1.0 - least)
    # Where x is between -1e-6 and 0 the difference to the exact formula is less than 1e-6 · negative.
    return tl.where(x > 0, positive * x * x, curve * negative) + 0.5 * x


@triton.jit
def softplus(x):
    return tl.maximum(x, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(x)))


@triton.jit
def glu_of(gate, up, limit, sharpness, ACT: tl.constexpr, DTYPE: tl.constexpr):
    """act(gate) · up. gate, up: float32 that hold values of type DTYPE; the result has type DTYPE. limit, sharpness: of
    swiglu_clamped."""
    if ACT == "swiglu_clamped":  # gpt-oss: (up + 1) · gate · sigmoid(sharpness · gate), both clamped
        gate = tl.where(gate > limit, limit, gate)
        up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))
        found = ((up + 1.0) * (gate * tl.sigmoid(gate * sharpness))).to(DTYPE)
    else:
        found = (activation(gate, ACT).to(DTYPE).to(tl.float32) * up).to(DTYPE)
    return found


@triton.jit
def _glu(
    gate, up, out, gate_stride, up_stride, out_stride, dim, gate_scale, limit, sharpness,
    ACT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < dim
    dtype = out.dtype.element_ty
    of_gate = tl.load(gate + row * gate_stride + columns, mask=inside, other=0.0).to(tl.float32)
    of_up = tl.load(up + row * up_stride + columns, mask=inside, other=0.0).to(tl.float32)
    if gate_scale is not None:
        of_gate = (of_gate * gate_scale).to(dtype).to(tl.float32)
    found = glu_of(of_gate, of_up, limit, sharpness, ACT, dtype)
    tl.store(out + row * out_stride + columns, found, mask=inside)


def glu(
    gate: Tensor, up: Tensor, out: Tensor, act: str, *, limit: float = 0.0, sharpness: float = 1.702,
    gate_scale: float = 1.0,
) -> None:  # fmt: skip
    """out = act(gate · gate_scale) · up. All [tokens, dim] of one type, rows of any stride; out may be gate or up."""
    tokens, dim = out.shape
    assert gate.shape == up.shape == out.shape, (gate.shape, up.shape, out.shape)
    assert gate.stride(1) == up.stride(1) == out.stride(1) == 1, (gate.stride(), up.stride(), out.stride())
    if tokens == 0:
        return
    _glu[(tokens, triton.cdiv(dim, _BLOCK))](
        gate, up, out, gate.stride(0), up.stride(0), out.stride(0), dim,
        None if gate_scale == 1.0 else float(gate_scale), float(limit), float(sharpness),
        ACT=act, BLOCK=_BLOCK, num_warps=4,
    )  # fmt: skip


@triton.jit
def _activate(x, out, weights, x_stride, out_stride, dim, ACT: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < dim
    dtype = out.dtype.element_ty
    values = tl.load(x + row * x_stride + columns, mask=inside, other=0.0).to(tl.float32)
    if ACT == "xielu":
        positive = softplus(tl.load(weights).to(tl.float32)).to(dtype).to(tl.float32)
        negative = (softplus(tl.load(weights + 1).to(tl.float32)) + 0.5).to(dtype).to(tl.float32)
        values = xielu(values, positive, negative)
    else:
        values = activation(values, ACT)
    tl.store(out + row * out_stride + columns, values.to(dtype), mask=inside)


def activate(x: Tensor, out: Tensor, act: str, weights: Tensor | None = None) -> None:
    """out = act(x). Both [tokens, dim] of one type, rows of any stride; out may be x. weights: alpha_p and alpha_n of
    xielu, [2]."""
    tokens, dim = out.shape
    assert x.shape == out.shape and x.stride(1) == out.stride(1) == 1, (x.shape, out.shape, x.stride(), out.stride())
    assert (weights is not None) == (act == "xielu"), act
    if tokens == 0:
        return
    _activate[(tokens, triton.cdiv(dim, _BLOCK))](
        x, out, weights, x.stride(0), out.stride(0), dim, ACT=act, BLOCK=_BLOCK, num_warps=4
    )


def _glu_variant(act: str) -> Variant:
    def launch(rows: int) -> None:
        both = shaped(rows, 2 * 3072)
        glu(both[:, :3072], both[:, 3072:], shaped(rows, 3072), act, limit=7.0)

    return Variant(name=f"glu bf16 {act}", launch=launch, plans={"_glu": WIDE})


def _variant(act: str) -> Variant:
    def launch(rows: int) -> None:
        x = shaped(rows, 3072)
        activate(x, x, act, shaped(2) if act == "xielu" else None)

    return Variant(name=f"activate bf16 {act}", launch=launch, plans={"_activate": WIDE})


VARIANTS = (
    *(_glu_variant(act) for act in ("gelu_tanh", "swiglu_clamped")),
    *(_variant(act) for act in ("gelu", "relu2", "tanh", "xielu")),
)
