"""Which incarnation of the engine a frame belongs to.

ZeroMQ hands what was queued for a dead process to the one that takes its address, and what a dead one has sent still
arrives. So every frame begins with its link and the epoch of its sender: with a process that dies another epoch begins,
older frames are dropped, and those of an epoch that a receiver has not heard of yet wait until it has.

Core and workers have an epoch of their own for what they say to each other: it ends only with one of them, so the death
of any other process does not touch a step under way.
"""

import struct
from enum import IntEnum

from .supervision import Reset

_HEADER = struct.Struct("<BI")  # link, epoch
HEADER_BYTES = _HEADER.size


class Link(IntEnum):
    """Between whom a frame travels."""

    CHAIN = 0  # the processes that requests go through
    DEVICE = 1  # core ⇄ worker
    CONTROL = 2  # the supervisor and anyone: never stale


class Epochs:
    """Of one process."""

    def __init__(self, chain: int = 1, device: int = 1) -> None:
        self._current = {Link.CHAIN: chain, Link.DEVICE: device, Link.CONTROL: 0}
        self.num_stale = 0  # frames that were dropped

    @property
    def chain(self) -> int:
        """The epoch of the chain."""
        return self._current[Link.CHAIN]

    @property
    def device(self) -> int:
        """The epoch of core and workers."""
        return self._current[Link.DEVICE]

    def advance(self, reset: Reset) -> bool:
        """Whether it begins an epoch that this process has not been in."""
        if reset.epoch <= self.chain:
            return False
        self._current[Link.CHAIN], self._current[Link.DEVICE] = reset.epoch, reset.device_epoch
        return True

    def header(self, link: Link) -> bytes:
        """What a frame sent now begins with."""
        return _HEADER.pack(link, self._current[link])

    def age(self, frame: bytes) -> int:
        """How many epochs ago it was sent; negative: its epoch is still to come. Raises ValueError if it is none."""
        try:
            link, epoch = _HEADER.unpack_from(frame)
            return self._current[Link(link)] - int(epoch)
        except struct.error:
            raise ValueError("it is shorter than its header") from None
