"""Epochs: how a receiver recognizes frames from before the death of a process.

ZeroMQ delivers frames queued for a dead process to its successor, and frames that the dead process sent still arrive.
Every frame therefore begins with its link, the number of its engine and the epoch of its sender. A death begins a new
epoch of that engine: frames of an earlier epoch are dropped, and frames of a later one wait until the receiver has
reached it. Several engines of one launch share its api processes, which have the epochs of each engine.

The link between core and workers has its own epoch, which only the death of one of these changes, or that of a
connection between them (`gaps.py`): the death of another process does not disturb a step in flight.

An epoch is a term and a counter. An engine on one machine has term 0, since no other launch can reach its mailboxes. An
engine on several machines has a new term with each start of its first launch (`procs/lead.py`), so a process that an
earlier launch left behind on another machine sends frames of an older epoch, whatever its counter was.
"""

import struct
from enum import IntEnum

from .messages import Reset

_HEADER = struct.Struct("<BBQ")  # link, engine, epoch
HEADER_BYTES = _HEADER.size
NO_ENGINE = 255
"""In place of an engine's number: api processes that several engines share, and their supervisor."""

_COUNTER_BITS = 32


def first_epoch(term: int) -> int:
    """The first epoch of a term; the next ones follow it one by one."""
    return term << _COUNTER_BITS | 1


def counter_of(epoch: int) -> int:
    """The number of an epoch within its term, from 1."""
    return epoch & ((1 << _COUNTER_BITS) - 1)


class Link(IntEnum):
    """The kind of connection that a frame takes."""

    CHAIN = 0  # between the processes of the chain
    DEVICE = 1  # core ⇄ worker
    CONTROL = 2  # to and from the supervisor: never stale


class Epochs:
    """The epochs of one process: of its engine, and in an api process of the other engines that it serves."""

    def __init__(self, chain: int = 1, device: int = 1, *, engine: int = 0) -> None:
        """`engine`: the number of the process's own one."""
        self.engine = engine
        self._current: dict[int, dict[Link, int]] = {}
        self.num_stale = 0  # frames that were dropped
        self.join(engine, chain, device)

    def join(self, engine: int, chain: int, device: int) -> None:
        """Frames of this engine may come as well."""
        self._current[engine] = {Link.CHAIN: chain, Link.DEVICE: device, Link.CONTROL: 0}

    @property
    def chain(self) -> int:
        """The epoch of the chain."""
        return self._current[self.engine][Link.CHAIN]

    @property
    def device(self) -> int:
        """The epoch of core and workers."""
        return self._current[self.engine][Link.DEVICE]

    def advance(self, reset: Reset) -> bool:
        """Enters the epoch of `reset`. False if this process is in it already."""
        current = self._current.get(reset.engine)
        if current is None or reset.epoch <= current[Link.CHAIN]:
            return False
        current[Link.CHAIN], current[Link.DEVICE] = reset.epoch, reset.device_epoch
        return True

    def header(self, link: Link, engine: int | None = None) -> bytes:
        """The header of a frame sent now. `engine`: of the receiver, if it is not the own one."""
        number = self.engine if engine is None else engine
        return _HEADER.pack(link, number, self._current[number][link])

    def age(self, frame: bytes) -> int:
        """Epochs since the frame's; negative: its epoch is later. Raises ValueError if `frame` has no valid header."""
        try:
            link, engine, epoch = _HEADER.unpack_from(frame)
            return self._current[engine][Link(link)] - int(epoch)
        except struct.error:
            raise ValueError("it is shorter than its header") from None
        except KeyError:
            raise ValueError("it is of another engine") from None
