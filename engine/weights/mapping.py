"""Which rows and columns of which tensors of a checkpoint make a matrix or vector of a program. Pure arithmetic on
names and sizes."""

import re
from collections.abc import Container, Iterator
from dataclasses import dataclass, replace

from ..models.description import Decoder, Part, Weight
from ..models.program import Matrix, Vector

# Buffers that old exporters saved although config.json determines them.
_DERIVED = r"(.*\.)?rotary_emb\.inv_freq"
_MAX_ROWS = 128  # that a quantized matrix packs or scales together (blocks of 8-bit floats)
_WRAPPERS = ("", "language_model.", "model.language_model.")  # what a tensor at the root of the model may be under


@dataclass(frozen=True)
class Source:
    """Rows and columns of one tensor of the checkpoint, and the rows of the target that they fill."""

    tensor: str
    parts: tuple[Part, ...]  # all of this tensor
    columns: tuple[int, int]  # (0, 0): a vector
    is_transposed: bool
    to: tuple[int, int]
    expert: int | None  # place in a stack; None: of all experts, whose tensors are one
    num_experts: int
    map: str
    only: tuple[int, ...] = ()  # of the experts of that one tensor; empty: all

    @property
    def is_module(self) -> bool:
        """Whether a checkpoint may have it quantized: as the weight of a module of its own, with its rows first."""
        is_matrix = self.columns[1] > 0 and not self.num_experts and not self.is_transposed
        return is_matrix and self.tensor.endswith(".weight")

    @property
    def run(self) -> tuple[int, int] | None:
        """[first, last) if the rows are adjacent."""
        part = self.parts[0]
        if len(self.parts) > 1 or (part.times > 1 and part.every != part.count):
            return None
        return part.first, part.first + part.rows

    def span(self, num: int) -> tuple[int, int]:
        """[first, last) of rows among which all are, where a stored matrix of `num` rows can be cut: no format packs or
        scales rows in larger units."""
        first = min(part.first for part in self.parts)
        return first // _MAX_ROWS * _MAX_ROWS, min(num, -(-self.end // _MAX_ROWS) * _MAX_ROWS)

    @property
    def end(self) -> int:
        """One more than the last row."""
        return max(part.first + (part.times - 1) * part.every + part.count for part in self.parts)

    def indices(self) -> list[int]:
        """The rows of the tensor, in the order of the target."""
        return [
            part.first + turn * part.every + row
            for part in self.parts
            for turn in range(part.times)
            for row in range(part.count)
        ]


class Names:
    """The names that a checkpoint has for what a description names."""

    def __init__(self, decoder: Decoder, present: Container[str]) -> None:
        """present: all tensors, and for each quantized matrix the name that it would have otherwise."""
        self._present = present
        table = decoder.embedding.table.parts[0].name
        found = [prefix for prefix in decoder.prefixes if prefix + table in present]
        self._prefix = found[0] if found else decoder.prefixes[0]
        self._ignored = re.compile("|".join((_DERIVED, *decoder.ignored)))
        self._turned: set[str] = set()

    def turn(self, name: str) -> None:
        """Says that a tensor of experts has rows and columns the other way round than its family's page has them."""
        self._turned.add(name)

    def is_ignored(self, name: str) -> bool:
        return self._ignored.fullmatch(name) is not None

    def of(self, name: str) -> str:
        """The checkpoint's name. A name at the root is that of a wrapped model if the root has none."""
        if not name.startswith("/"):
            return self._prefix + name
        known = [wrapper + name[1:] for wrapper in _WRAPPERS]
        return next((each for each in known if each in self._present), known[0])

    def sources(self, target: Matrix | Vector) -> list[Source]:
        """What fills a target. Those of `Weight.other` if the tensors of the weight are not there."""
        found: list[Source] = []
        first = 0
        for weight in target.weights:
            found += self._of_weight(self._chosen(weight), first)
            first += weight.rows
        return found

    def _chosen(self, weight: Weight) -> Weight:
        while weight.other is not None and self.of(_name(weight.parts[0], 0)) not in self._present:
            weight = weight.other
        return weight

    def _of_weight(self, weight: Weight, first: int) -> Iterator[Source]:
        for parts in _by_tensor(weight.parts):
            rows = sum(part.rows for part in parts)
            is_separate = "{e}" in parts[0].name
            own = weight.only or range(weight.experts)
            for place in range(weight.experts) if is_separate else (None,):
                tensor = self.of(_name(parts[0], 0 if place is None else own[place]))
                yield Source(
                    tensor=tensor,
                    parts=parts,
                    columns=(weight.first_column, weight.first_column + weight.columns),
                    is_transposed=weight.is_transposed != (tensor in self._turned),
                    to=(first, first + rows),
                    expert=place,
                    num_experts=0 if is_separate else weight.experts,
                    map=weight.map,
                    only=() if is_separate else weight.only,
                )
            first += rows


def shapes_of(sources: list[Source]) -> dict[str, tuple[int, ...]]:
    """Tensor → the shape that it must have. sources: of a whole model."""
    ends: dict[str, Source] = {}
    for source in sources:
        known = ends.get(source.tensor)
        ends[source.tensor] = source if known is None else replace(known, parts=known.parts + source.parts)
    shapes = {}
    for name, source in ends.items():
        matrix = (source.end,) if source.columns[1] == 0 else (source.end, source.columns[1])
        if source.is_transposed:
            matrix = matrix[::-1]
        shapes[name] = (source.num_experts, *matrix) if source.num_experts else matrix
    return shapes


def _name(part: Part, expert: int) -> str:
    return part.name.replace("{e}", str(expert))


def _by_tensor(parts: tuple[Part, ...]) -> Iterator[tuple[Part, ...]]:
    """Runs of parts of one tensor."""
    run: list[Part] = []
    for part in parts:
        if run and part.name != run[0].name:
            yield tuple(run)
            run = []
        run.append(part)
    if run:
        yield tuple(run)
