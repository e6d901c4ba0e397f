"""Kernels of Triton in tests: once in a process, whichever of the folders that need them comes first."""

from functools import cache

from pagewire.tools.triton_interpreter import interpret


@cache
def interpret_once() -> None:
    """Before anything of `pagewire.kernels.triton` is imported."""
    interpret()
