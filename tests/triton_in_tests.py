"""Switches Triton to its interpreter, once per test process, for all folders that need it."""

from functools import cache

from pagewire.tools.triton_interpreter import interpret


@cache
def interpret_once() -> None:
    """Call it before anything of `pagewire.kernels.triton` is imported."""
    interpret()
