"""How often a program reads each number of a checkpoint's tensors."""

from collections.abc import Container, Iterable

import numpy as np
from numpy.typing import NDArray

from pagewire.engine.models.description import Decoder
from pagewire.engine.models.program import Program
from pagewire.engine.weights.mapping import Names, Source, shapes_of

Claims = dict[str, NDArray[np.int64]]


def sources(decoder: Decoder, program: Program, present: Container[str] = ()) -> list[Source]:
    names = Names(decoder, present)
    return [source for target in program.targets for source in names.sources(target)]


def shapes(decoder: Decoder, program: Program, present: Container[str] = ()) -> dict[str, tuple[int, ...]]:
    """Tensor → the shape that it must have. program: of the whole decoder."""
    return shapes_of(sources(decoder, program, present))


def claims(found: Iterable[Source], of: dict[str, tuple[int, ...]]) -> Claims:
    """Tensor → the number of reads of each of its numbers."""
    counts = {name: np.zeros(shape, np.int64) for name, shape in of.items()}
    for source in found:
        array = counts[source.tensor]
        if source.columns[1]:
            matrices = array.swapaxes(-1, -2) if source.is_transposed else array
            columns = matrices[..., slice(*source.columns)]
            np.add.at(np.moveaxis(columns, -2, 0), np.array(source.indices()), 1)
        else:
            np.add.at(np.moveaxis(array, -1, 0), np.array(source.indices()), 1)
    return counts
