"""What the host sends the device for a step: one int32 array, filled in a ring of pinned memory and sent in one copy.

The sections have fixed offsets, because recorded kernels read them there. Only the part that a step uses is sent, so
the sections stand in the order

    samples of the last part, …, of the second part, tiles, samples of the first part, step

The section `step`, whose length varies most, comes last; `kernels/triton/prepare_step.py` describes it. It also holds
what a step does with recurrent states, and then the records of opened rows. Steps without tiles, and those with more
samples than one part has, differ in where the sent part begins.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...kernels.triton.open_rows import FIELDS as OPEN_FIELDS
from ...kernels.triton.prepare_step import STATES_AT, packet_size
from ...kernels.triton.scans import states_size

_COLUMNS = 5  # of `Part`
_SCORED = 64  # with fewer, the head is read too often; each takes the logits of a vocabulary
_ALIGNED = 4  # int32: kernels' pointers must be at a multiple of 16 bytes


@dataclass(frozen=True)
class Limits:
    """The sizes of the largest step."""

    rows: int
    tokens: int
    samples: int  # a multiple of `part`
    part: int  # tokens sampled at once
    tiles: int  # attention tiles of rows with several tokens
    blocks: int  # per row
    tables: int = 1  # per row: one for each shelf of each group of the cache but that of states
    state_pages: int = 0  # of a row; 0: the model has no recurrent layers
    behind: int = 0  # draft tokens of a row in all steps whose results the host does not know

    @property
    def scored(self) -> int:
        """Prompt tokens whose log-probabilities are computed at once."""
        return max(self.part, min(self.tokens, _SCORED))


@dataclass(frozen=True)
class Part:
    """The samples of one part, on the device. All are [part]."""

    tokens: Tensor  # the step's token whose logits are sampled from
    rows: Tensor  # rows of the state; padding samples for the row after the last
    places: Tensor  # index into the edited logits of the part; -1: no edit
    masks: Tensor  # index into the state's masks; -1: all tokens are allowed
    asking: Tensor  # samples of the part whose log-probabilities are wanted; -1: none


@dataclass(frozen=True)
class Packet:
    """The sections of one array, on the host or on the device."""

    whole: Tensor
    parts: tuple[Part, ...]
    tiles: Tensor  # [1 + tiles, 4], see `extend_attention.extend_work`
    step: Tensor  # see `prepare_step.py`
    states: Tensor | None  # its part from which the table of states is found, see `scans.py`; None: there are no states

    @classmethod
    def over(cls, whole: Tensor, limits: Limits) -> "Packet":
        """The sections of `whole`, [size_of(limits)]."""
        *parts, tiles, first, step = torch.split(whole, _sizes(limits))
        states = step[STATES_AT:] if limits.state_pages else None
        sections = [_part(section, limits) for section in (first, *reversed(parts))]
        return cls(whole, tuple(sections), tiles.view(-1, 4), step, states)


def _part(section: Tensor, limits: Limits) -> Part:
    columns = section.view(_COLUMNS, -1)[:, : limits.part]
    return Part(*columns.unbind())


def _sizes(limits: Limits) -> list[int]:
    new_blocks = limits.rows * limits.blocks
    ids = limits.tokens + limits.rows * limits.behind
    step = packet_size(rows=limits.rows, tokens=ids, new_blocks=new_blocks, tables=limits.tables)
    if limits.state_pages:
        step += states_size(rows=limits.rows, tokens=limits.tokens, pages=limits.state_pages)
    step = _aligned(step) + OPEN_FIELDS * limits.rows
    part = _COLUMNS * _aligned(limits.part)
    num_parts = max(1, limits.samples // limits.part)
    return [part] * (num_parts - 1) + [4 * (1 + limits.tiles), part, step]


def _aligned(size: int) -> int:
    return -(-size // _ALIGNED) * _ALIGNED


def size_of(limits: Limits) -> int:
    """The length of a packet in int32."""
    return sum(_sizes(limits))


@dataclass(frozen=True)
class HostPart:
    """`Part` as NumPy arrays."""

    tokens: NDArray[np.int32]
    rows: NDArray[np.int32]
    places: NDArray[np.int32]
    masks: NDArray[np.int32]
    asking: NDArray[np.int32]


class HostPacket:
    """A packet of the ring as NumPy arrays."""

    def __init__(self, whole: Tensor, limits: Limits) -> None:
        packet = Packet.over(whole, limits)
        self.whole = whole
        self.parts = [
            HostPart(*(column.numpy() for column in (each.tokens, each.rows, each.places, each.masks, each.asking)))
            for each in packet.parts
        ]
        self.tiles: NDArray[np.int32] = packet.tiles.numpy()
        self.step: NDArray[np.int32] = packet.step.numpy()
        *parts, self._tiles_size, self._part_size, _ = _sizes(limits)
        self._step_at = sum(parts) + self._tiles_size + self._part_size

    def opens(self, num_step: int, num: int) -> tuple[int, NDArray[np.int32]]:
        """Where records for `num` opened rows begin in a section `step` that holds `num_step` int32 before them, and
        the records: [num, OPEN_FIELDS]."""
        first = _aligned(num_step)
        return first, self.step[first : first + num * OPEN_FIELDS].reshape(num, OPEN_FIELDS)

    def used(self, num_step: int, *, num_parts: int, has_tiles: bool) -> slice:
        """The part to send if `step` holds `num_step` int32, and samples stand in the first `num_parts` parts."""
        first = self._step_at - self._part_size
        if has_tiles or num_parts > 1:
            first -= self._tiles_size + max(0, num_parts - 1) * self._part_size
        return slice(first, self._step_at + num_step)
