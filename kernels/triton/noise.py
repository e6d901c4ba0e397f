"""The sampling noise of a token: a hash of its request's seed, its output position and its id.

The hash is that of `engine/steps/sampler.py`, where its source is given, so a request samples the same tokens on a GPU
as on a CPU if the logits are equal. Integers are equal bit for bit; each device rounds logarithms in its own way.
"""

import triton
import triton.language as tl

_STEP = tl.constexpr(0x9E3779B97F4A7C15)
_MULTIPLY_1 = tl.constexpr(0xBF58476D1CE4E5B9)
_MULTIPLY_2 = tl.constexpr(0x94D049BB133111EB)
_UNIT = tl.constexpr(2.0**-31)
_MAX = tl.constexpr(1 - 2.0**-24)


@triton.jit
def noise_key(seed, position):
    """The state in which a row's generator starts, uint64. seed: int64; position: int32, output position from 0."""
    of_seed = _mix(seed.to(tl.uint64) + _STEP)
    return _mix(of_seed + (position + 1).to(tl.uint64) * _STEP)


@triton.jit
def exponential(key, tokens):
    """Exponentially distributed float32 for each of the tokens, int32; -log of it is Gumbel noise.

    The uniform number u has 31 bits. log(1 - u) must keep the digits of a small u, because small values win. The part
    of u that 1 - u loses by rounding is added to the logarithm, to first order, which is all that float32 can hold.
    """
    z = key + (tokens + 1).to(tl.uint64) * _STEP
    z = (z ^ (z >> 30)) * _MULTIPLY_1
    z = (z ^ (z >> 27)) * _MULTIPLY_2
    # The last step of the mix leaves the 31 highest bits alone, and only those are used.
    uniform = tl.minimum(((z >> 33).to(tl.int32).to(tl.float32) + 0.5) * _UNIT, _MAX)
    rest = 1.0 - uniform
    lost = (1.0 - rest) - uniform
    return -(tl.log(rest) + lost)


@triton.jit
def _mix(z):
    z = (z ^ (z >> 30)) * _MULTIPLY_1
    z = (z ^ (z >> 27)) * _MULTIPLY_2
    return z ^ (z >> 31)
