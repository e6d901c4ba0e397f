"""What the host tells the device of a step: one int32 array, filled in a ring of pinned memory and sent in one copy.

The sections lie at fixed places, since recorded kernels read them there; what varies most in length comes last, and
only what is filled is sent. The last section is that of `kernels/triton/prepare_step.py`, which says what is in it.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...kernels.triton.open_rows import FIELDS as OPEN_FIELDS
from ...kernels.triton.prepare_step import packet_size


@dataclass(frozen=True)
class Limits:
    """The largest step."""

    rows: int
    tokens: int
    samples: int  # a multiple of `part`
    part: int  # draws that are sampled at once
    tiles: int  # of the attention of rows with several tokens
    blocks: int  # of a row


@dataclass(frozen=True)
class Packet:
    """The sections of one array, on the host or on the device. `draw_…` and the next three are [draws]."""

    whole: Tensor
    draw_tokens: Tensor  # the step's token whose logits are drawn from
    sample_rows: Tensor  # rows of the state; what is left over draws for the row beyond the last
    draw_positions: Tensor  # of the output, from 0
    places: Tensor  # among the edited logits of its part of the draws; -1: as they are
    masks: Tensor  # which of the state's masks says what may be drawn; -1: anything
    asking: Tensor  # draws of the part whose log-probabilities are wanted; -1: none
    decode_lens: Tensor  # [rows] keys of the rows with one token, which are the first; 0 for all others
    tiles: Tensor  # [tiles, 4], see `extend_attention.extend_work`
    opens: Tensor  # [rows, OPEN_FIELDS]
    step: Tensor

    @classmethod
    def over(cls, whole: Tensor, limits: Limits) -> "Packet":
        """The sections of `whole`, [size_of(limits)]."""
        tokens, rows, positions, places, masks, asking, lens, tiles, opens, step = torch.split(whole, _sizes(limits))
        lens, tiles, opens = lens[: limits.rows], tiles.view(-1, 4), opens.view(-1, OPEN_FIELDS)
        return cls(whole, tokens, rows, positions, places, masks, asking, lens, tiles, opens, step)


def _sizes(limits: Limits) -> list[int]:
    step = packet_size(rows=limits.rows, tokens=limits.tokens, new_blocks=limits.rows * limits.blocks)
    sizes = [limits.samples] * 6 + [limits.rows, 4 * limits.tiles, OPEN_FIELDS * limits.rows]
    # A kernel's pointers are multiples of 16 bytes.
    return [-(-size // 4) * 4 for size in sizes] + [step]


def size_of(limits: Limits) -> int:
    """Numbers of a packet."""
    return sum(_sizes(limits))


class HostPacket:
    """A packet of the ring, as NumPy arrays."""

    def __init__(self, whole: Tensor, limits: Limits) -> None:
        packet = Packet.over(whole, limits)
        self.whole = whole
        self.draw_tokens = _array(packet.draw_tokens)
        self.sample_rows = _array(packet.sample_rows)
        self.draw_positions = _array(packet.draw_positions)
        self.places = _array(packet.places)
        self.masks = _array(packet.masks)
        self.asking = _array(packet.asking)
        self.decode_lens = _array(packet.decode_lens)
        self.tiles: NDArray[np.int32] = packet.tiles.numpy()
        self.opens: NDArray[np.int32] = packet.opens.numpy()
        self.step = _array(packet.step)
        self._step_at = whole.numel() - packet.step.numel()

    def filled(self, num_step: int) -> Tensor:
        """What has to be sent if the last section holds so many numbers."""
        return self.whole[: self._step_at + num_step]


def _array(section: Tensor) -> NDArray[np.int32]:
    array: NDArray[np.int32] = section.numpy()
    return array
