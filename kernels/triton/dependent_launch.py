"""Kernels that the device may begin to launch while the kernel before them still runs.

Between two kernels of a stream, or two nodes of a CUDA graph, a GPU is idle for about a microsecond: the second one's
programs start when the first one's have ended. From sm_90 on a launch may say that its programs can start earlier
(programmatic dependent launch). They then set up, and wait in the kernel for the end of the one before.

A kernel with `dependent` in place of `triton.jit` is launched so, and must call `await_previous` before everything
else. After that call all kernels before it in the stream have ended and what they wrote can be read, because each of
those that started early has waited in the same way. So nothing changes for the kernel, for kernels that are launched
as usual, for copies, or for events. `compile.py` checks in the machine code of every such kernel that no program reads
or writes memory, or ends, before it has waited.
"""

from collections.abc import Callable
from typing import Any, overload

import triton
from triton import knobs
from triton.language import target_info
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.runtime import driver
from triton.runtime.jit import JITFunction

FIRST = 90
"""The lowest architecture that has it."""


@triton.jit
def await_previous():
    """Waits until the kernel before this one has ended. Then lets the programs of the next one start where this one
    leaves room: not before, or they would take the room of kernels that this one waits for."""
    if target_info.cuda_capability_geq(9, 0):
        gdc_wait()
        gdc_launch_dependents()


class _Dependent(JITFunction[Any]):
    """Is launched early where the device can do it."""

    def run(self, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        if driver.active.get_current_target().arch >= FIRST:
            kwargs["launch_pdl"] = True
        return super().run(*args, grid=grid, warmup=warmup, **kwargs)


@overload
def dependent(fn: Callable[..., Any]) -> JITFunction[Any]: ...
@overload
def dependent(*, do_not_specialize: list[str]) -> Callable[[Callable[..., Any]], JITFunction[Any]]: ...
def dependent(fn: Callable[..., Any] | None = None, *, do_not_specialize: list[str] | None = None) -> Any:
    """`triton.jit` for a kernel that begins with `await_previous()`."""
    if fn is None:
        return lambda fn: _made(fn, do_not_specialize)
    return _made(fn, do_not_specialize)


def _made(fn: Callable[..., Any], do_not_specialize: list[str] | None) -> Any:
    if knobs.runtime.interpret:
        return triton.jit(fn, do_not_specialize=do_not_specialize)
    return _Dependent(fn, do_not_specialize=do_not_specialize)
