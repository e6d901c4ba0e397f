"""Where the recurrent states of a step's rows lie: in equal pages of the KV memory. `kernels/cpu/scans.h` has the same
in C."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from .lanes import LANES


@dataclass(frozen=True, eq=False)
class StateRows:
    """The rows of a step. The states of one row lie in the same number of pages, which need not be adjacent. A page
    number below zero stands for zeros to read and for nothing to write.

    Pages that are written belong to one row. Pages that are read may serve several rows, and a row may read the pages
    that it writes. Index tensors lie on the CPU, dense.
    """

    memory: Tensor  # [pages, page bytes] uint8
    counts: Tensor  # [rows] int64: tokens of each row; a step's tokens are packed, row after row
    read: Tensor  # [rows, k] int32: the state before a row's first token
    written: Tensor  # [rows, k] int32: where the state goes after its last token
    keep_rows: Tensor  # [keeps] int64, ascending: a row whose state is kept in the midst of the step
    keep_counts: Tensor  # [keeps] int64, ascending within a row: after how many of the row's tokens
    keep_pages: Tensor  # [keeps, k] int32: where it is kept

    @staticmethod
    def of(
        memory: Tensor,
        counts: list[int],
        read: list[list[int]],
        written: list[list[int]],
        keeps: list[tuple[int, int, list[int]]] | None = None,
    ) -> "StateRows":
        """From lists. keeps: (row, count, pages), in any order."""
        kept = sorted(keeps or [])
        assert all(0 <= count <= counts[row] for row, count, _ in kept), f"{kept} lie outside of {counts} tokens"
        shape, keep_shape = (len(counts), len(read[0]) if read else 0), (len(kept), len(read[0]) if read else 0)
        return StateRows(
            memory=memory,
            counts=torch.tensor(counts, dtype=torch.int64),
            read=torch.tensor(read, dtype=torch.int32).view(shape),
            written=torch.tensor(written, dtype=torch.int32).view(shape),
            keep_rows=torch.tensor([row for row, _, _ in kept], dtype=torch.int64),
            keep_counts=torch.tensor([count for _, count, _ in kept], dtype=torch.int64),
            keep_pages=torch.tensor([pages for _, _, pages in kept], dtype=torch.int32).view(keep_shape),
        )

    def segments(self) -> Iterator["Segment"]:
        """The step in its order: each row's tokens, cut where its state is kept."""
        read, written, keep_pages = self.read.tolist(), self.written.tolist(), self.keep_pages.tolist()
        keeps: dict[int, list[tuple[int, list[int]]]] = {}
        for row, count, pages in zip(self.keep_rows.tolist(), self.keep_counts.tolist(), keep_pages, strict=True):
            keeps.setdefault(row, []).append((count, pages))
        first = 0
        for row, count in enumerate(self.counts.tolist()):
            done, before = 0, read[row]
            for end, pages in [*keeps.get(row, []), (count, written[row])]:
                yield Segment(first + done, first + end, before, pages)
                done, before = end, None
            first += count


@dataclass(frozen=True)
class Segment:
    """Tokens [first, end) of a step, and the pages of the state before and after them."""

    first: int
    end: int
    read: list[int] | None  # None: the state after the segment before
    written: list[int]


@dataclass(frozen=True, eq=False)
class Tiles:
    """Where the states of one layer lie in a row's pages. The state of a unit (a head, a group of 16 channels, or all
    of a convolution) is contiguous; `per_tile` units follow each other in a tile. Tile i begins at byte `offsets[i]` of
    the row's page number `shelves[i]`."""

    shelves: Tensor  # [tiles] int32
    offsets: Tensor  # [tiles] int64, multiples of 4
    per_tile: int

    def load(self, memory: Tensor, pages: list[int], shape: tuple[int, ...]) -> Tensor:
        """The states of a row as float32 of `shape`, whose first dimension counts units. Zeros where there is no
        page."""
        states = memory.new_zeros(shape, dtype=torch.float32)
        for tile, at in self._places(memory, pages, states):
            tile.copy_(at)
        return states

    def store(self, memory: Tensor, pages: list[int], states: Tensor) -> None:
        """Writes the states of a row, [units, ...] float32, where there are pages."""
        for tile, at in self._places(memory, pages, states.contiguous()):
            at.copy_(tile)

    def _places(self, memory: Tensor, pages: list[int], states: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Each tile's part of the states, and its place in memory; both [numbers] float32."""
        flat = states.view(states.shape[0], -1)
        for i, (shelf, offset) in enumerate(zip(self.shelves.tolist(), self.offsets.tolist(), strict=True)):
            part = flat[i * self.per_tile : (i + 1) * self.per_tile].view(-1)
            if pages[shelf] >= 0:
                yield part, memory[pages[shelf], offset : offset + part.numel() * 4].view(torch.float32)


def grouped(weight: Tensor) -> Tensor:
    """A weight of Mamba 1 in the layout of its states, which are groups of LANES channels: [channels, n] → [groups, n,
    LANES], the last group padded with zeros."""
    channels, n = weight.shape
    padded = torch.nn.functional.pad(weight, (0, 0, 0, -channels % LANES))
    return padded.view(-1, LANES, n).transpose(1, 2).contiguous()
