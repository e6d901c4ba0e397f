"""The sizes that a step's kernels are launched for. A graph is recorded for a shape, so there must be few of them.

A step is padded up to the next shape. Padding costs little: a row without keys and a token without a slot leave nothing
behind, and in the matrix products they share the tiles of others.
"""

from bisect import bisect_left
from dataclasses import dataclass

_FEW = (1, 2, 4, 8, 16)  # rows that decode; from here on in steps of 16, beyond 256 of 32
_LEAST_MIXED = 64  # tokens
_GROWTH = 1.25  # between the sizes of steps with prompts
_TILE = 16  # that sizes are multiples of


@dataclass(frozen=True, order=True)
class StepShape:
    """What the model is run for."""

    tokens: int
    tile_rows: int  # of the attention of rows with several tokens; 0: no row has several


@dataclass(frozen=True, order=True)
class SampleShape:
    """What tokens are drawn for."""

    samples: int
    kind: int  # of `sampling.Kind`: 0 greedy, 1 drawn, 2 filtered
    edits: bool  # some rows have a bias, penalties or a mask
    logprobs: bool


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
    """The smallest size that holds as many."""
    return sizes[bisect_left(sizes, wanted)]
