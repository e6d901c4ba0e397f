"""What the host sends the device for a step: one int32 array, filled in a ring of pinned memory and sent in one copy.

The sections have fixed offsets, because recorded kernels read them there. The section whose length varies most comes
last, and only its used part is sent; `kernels/triton/prepare_step.py` describes it. What a step does with recurrent
states is a part of it.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...kernels.triton.open_rows import FIELDS as OPEN_FIELDS
from ...kernels.triton.prepare_step import STATES_AT, packet_size
from ...kernels.triton.scans import states_size


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


@dataclass(frozen=True)
class Packet:
    """The sections of one array, on the host or on the device. Those from `sample_tokens` to `asking` are [samples]."""

    whole: Tensor
    sample_tokens: Tensor  # the step's token whose logits are sampled from
    sample_rows: Tensor  # rows of the state; padding samples for the row after the last
    sample_positions: Tensor  # of the output, from 0
    places: Tensor  # index into the edited logits of the part; -1: no edit
    masks: Tensor  # index into the state's masks; -1: all tokens are allowed
    asking: Tensor  # samples of the part whose log-probabilities are wanted; -1: none
    decode_lens: Tensor  # [rows] keys of the rows with one token, which come first; 0 for all others
    tiles: Tensor  # [1 + tiles, 4], see `extend_attention.extend_work`
    opens: Tensor  # [rows, OPEN_FIELDS]
    step: Tensor  # see `prepare_step.py`
    states: Tensor | None  # its part from which the table of states is found, see `scans.py`; None: there are no states

    @classmethod
    def over(cls, whole: Tensor, limits: Limits) -> "Packet":
        """The sections of `whole`, [size_of(limits)]."""
        tokens, rows, positions, places, masks, asking, lens, tiles, opens, step = torch.split(whole, _sizes(limits))
        lens, tiles, opens = lens[: limits.rows], tiles.view(-1, 4), opens.view(-1, OPEN_FIELDS)
        states = step[STATES_AT:] if limits.state_pages else None
        return cls(whole, tokens, rows, positions, places, masks, asking, lens, tiles, opens, step, states)


def _sizes(limits: Limits) -> list[int]:
    new_blocks = limits.rows * limits.blocks
    step = packet_size(rows=limits.rows, tokens=limits.tokens, new_blocks=new_blocks, tables=limits.tables)
    if limits.state_pages:
        step += states_size(rows=limits.rows, tokens=limits.tokens, pages=limits.state_pages)
    sizes = [limits.samples] * 6 + [limits.rows, 4 * (1 + limits.tiles), OPEN_FIELDS * limits.rows]
    # Every section starts at a multiple of 16 bytes, as kernels' pointers must.
    return [-(-size // 4) * 4 for size in sizes] + [step]


def size_of(limits: Limits) -> int:
    """The length of a packet in int32."""
    return sum(_sizes(limits))


class HostPacket:
    """A packet of the ring as NumPy arrays."""

    def __init__(self, whole: Tensor, limits: Limits) -> None:
        packet = Packet.over(whole, limits)
        self.whole = whole
        self.sample_tokens = _array(packet.sample_tokens)
        self.sample_rows = _array(packet.sample_rows)
        self.sample_positions = _array(packet.sample_positions)
        self.places = _array(packet.places)
        self.masks = _array(packet.masks)
        self.asking = _array(packet.asking)
        self.decode_lens = _array(packet.decode_lens)
        self.tiles: NDArray[np.int32] = packet.tiles.numpy()
        self.opens: NDArray[np.int32] = packet.opens.numpy()
        self.step = _array(packet.step)
        self._step_at = whole.numel() - packet.step.numel()

    def filled(self, num_step: int) -> Tensor:
        """The part to send if the last section holds `num_step` int32."""
        return self.whole[: self._step_at + num_step]


def _array(section: Tensor) -> NDArray[np.int32]:
    array: NDArray[np.int32] = section.numpy()
    return array
