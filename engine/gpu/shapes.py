"""The sizes for which a step's kernels are launched. A graph is recorded per shape, so there must be few shapes.

A step is padded to the next shape. Padding is cheap: a row without keys and a token without a slot write nothing, and
in the matrix products they share tiles with others.
"""

from bisect import bisect_left
from dataclasses import dataclass

_FEW = (1, 2, 4, 8, 16)  # decode rows; then in steps of 16, and beyond 256 of 32
_LEAST_MIXED = 64  # tokens
_GROWTH = 1.25  # ratio between the sizes of steps with prompts
_TILE = 16  # sizes are multiples of it


@dataclass(frozen=True, order=True)
class StepShape:
    """The shape of a pass through the model."""

    tokens: int
    tile_rows: int  # of the attention tiles of rows with several tokens; 0: no row has several


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


def decode_sizes(most: int) -> tuple[int, ...]:
    """Ascending; the last is `most`."""
    sizes = [*_FEW, *range(32, 257, 16), *range(288, most + 32, 32)]
    return (*(size for size in sizes if size < most), most)


def mixed_sizes(most: int) -> tuple[int, ...]:
    """Ascending; the last is `most`."""
    sizes = []
    size = float(_LEAST_MIXED)
    while size < most:
        sizes.append(round(size / _TILE) * _TILE)
        size *= _GROWTH
    return (*(size for size in sizes if size < most), most)


def at_least(sizes: tuple[int, ...], wanted: int) -> int:
    """The smallest size that is at least `wanted`."""
    return sizes[bisect_left(sizes, wanted)]
