"""Switches Triton to its interpreter, once per test process."""

from functools import cache

from pagewire.tools.triton_interpreter import interpret


@cache
def interpret_once() -> None:
    """Must be called before any module of `pagewire.kernels.triton` is imported."""
    interpret()
