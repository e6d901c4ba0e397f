"""float32 values as int32 in the same order, for searches that bisect an interval and for selections that remove what
they selected."""

import triton
import triton.language as tl

REMOVED = tl.constexpr(-(2**31))  # less than the ordinal of every number


@triton.jit
def to_ordinal(x):
    """int32 in the order of x, float32. -0.0 comes just before 0.0; a NaN lies beyond the infinity of its sign."""
    bits = x.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def from_ordinal(ordinal):
    """The inverse of `to_ordinal`."""
    bits = ordinal ^ ((ordinal >> 31) & 0x7FFFFFFF)
    return bits.to(tl.float32, bitcast=True)
