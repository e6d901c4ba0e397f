"""The table of kernels: chosen once in the worker and passed down, so that layers never ask where they run."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from . import reference


@dataclass(frozen=True, kw_only=True)
class Ops:
    """One implementation of every operation. `reference.py` says what each must compute."""

    rms_norm: Callable[[Tensor, Tensor, float], Tensor]
    add_rms_norm: Callable[[Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]]
    silu_mul: Callable[[Tensor], Tensor]
    rotary: Callable[[Tensor, Tensor, Tensor], Tensor]
    write_kv: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], None]
    attend: Callable[[Tensor, Tensor, Tensor, Tensor, float, float | None], Tensor]


def reference_ops() -> Ops:
    """Plain torch, on any device."""
    return Ops(
        rms_norm=reference.rms_norm,
        add_rms_norm=reference.add_rms_norm,
        silu_mul=reference.silu_mul,
        rotary=reference.rotary,
        write_kv=reference.write_kv,
        attend=reference.attend,
    )
