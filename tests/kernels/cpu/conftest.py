"""Tests that take the fixture `level` run on every level of the C kernels."""

from kernel_levels import kernels_of_level, level

__all__ = ["kernels_of_level", "level"]
