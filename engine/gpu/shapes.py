"""The sizes for which a step's kernels are launched. A graph is recorded per shape, so there must be few shapes.

A step is padded to the next shape. A row without keys and a token without a slot write nothing, but each padding token
costs as much in the matrix products as a real one. So the steps between the sizes are fine where products take most of
the time. Beyond `MAX_RECORDED` tokens the device computes longer than the host needs to launch the kernels one by one
(estimated, not measured): these steps are not recorded, so their sizes cost nothing and lie close together.
"""

from bisect import bisect_left
from dataclasses import dataclass

MAX_RECORDED = 2048  # tokens of a step with prompts

_FEW = (1, 2, 4, 8, 16)  # decode rows; then in steps of 16, and beyond 256 of 32
_LEAST_MIXED = 64  # tokens
_COARSE, _FINE = 1.25, 1.06  # ratio between sizes of steps with prompts,
_MANY = 512  # and the tokens from which on it is the smaller one
_TILE = 16  # sizes are multiples of it
_UNRECORDED = 64  # the distance between sizes beyond MAX_RECORDED


@dataclass(frozen=True, order=True)
class StepShape:
    """The shape of a pass through the model."""

    tokens: int
    tile_rows: int  # of the attention tiles of rows with several tokens; 0: no row has several

    @property
    def is_recorded(self) -> bool:
        return not self.tile_rows or self.tokens <= MAX_RECORDED


@dataclass(frozen=True, order=True)
class SampleShape:
    """The shape of one part of a step's samples."""

    samples: int
    kind: int  # index into `state.KINDS`: 0 greedy, 1 sampled, 2 filtered
    edits: bool  # some rows have a bias, penalties or a mask
    logprobs: bool

    @property
    def is_plain(self) -> bool:
        """Whether the best token of each part of the vocabulary tells the sampled one."""
        return self.kind < 2 and not self.edits and not self.logprobs


def most_recorded(most: int) -> int:
    """Tokens of the largest step that is recorded, if steps have `most` tokens at most."""
    return min(most, MAX_RECORDED)


def decode_sizes(most: int) -> tuple[int, ...]:
    """Ascending; the last is `most`."""
    sizes = [*_FEW, *range(32, 257, 16), *range(288, most + 32, 32)]
    return (*(size for size in sizes if size < most), most)


def mixed_sizes(most: int) -> tuple[int, ...]:
    """Ascending, with all powers of two from 64 on; the last is `most`."""
    sizes = []
    size = _LEAST_MIXED
    while size < min(most, MAX_RECORDED + 1):
        sizes.append(size)
        ratio = _COARSE if size < _MANY else _FINE
        size = min(max(int(size * ratio) // _TILE, size // _TILE + 1) * _TILE, 1 << size.bit_length())
    return (*sizes, *range(MAX_RECORDED + _UNRECORDED, most, _UNRECORDED), most)


def powers(sizes: tuple[int, ...]) -> tuple[int, ...]:
    """The powers of two among the sizes, and the last one."""
    return tuple(size for size in sizes if size & (size - 1) == 0 or size == sizes[-1])


def at_least(sizes: tuple[int, ...], wanted: int) -> int:
    """The smallest size that is at least `wanted`."""
    return sizes[bisect_left(sizes, wanted)]
