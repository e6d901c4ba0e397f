"""Gaps: how a receiver notices that a connection between machines has lost frames.

When a TCP connection breaks, ZeroMQ connects again and says nothing, and what was under way is lost. So a frame that
goes over TCP has, after its header, its number among the frames of its sender to this mailbox in its epoch (from 1)
and the sender's name. A frame without a message repeats the number of the last one. A process sends one to each mailbox
with its `Pong`, so that the loss of the last message is noticed, too.

What follows a gap in the same epoch is dropped: a plan, for example, is a difference to the one before. Frames of
supervisors have no number, since their senders repeat them, nor have those over ipc://: both ends are on one machine,
and a connection there ends with one of the two processes.
"""

import struct
from collections.abc import Callable

from .epochs import HEADER_BYTES

_NUMBER = struct.Struct("<QB")  # the frame's number, the length of the sender's name
_LOST = -1  # in place of a number: there was a gap

OnGap = Callable[[str], None]
"""Called once in an epoch of a sender, with its name."""


def fail(sender: str) -> None:
    """An `OnGap` for mailboxes whose owner cannot begin anew."""
    raise ConnectionError(f"messages of {sender} were lost, because its connection broke")


class Numbers:
    """The numbers of one sender's frames to one mailbox."""

    def __init__(self, sender: str) -> None:
        self._sender = sender.encode()
        self._header = b""
        self._number = 0  # of the last frame with this header

    def head(self, header: bytes) -> bytes:
        """What precedes the next message. `header`: of `Epochs`; another one begins the numbers anew."""
        if header != self._header:
            self._header, self._number = header, 0
        return header + _NUMBER.pack(self._number + 1, len(self._sender)) + self._sender

    def count(self) -> None:
        """The next message was sent."""
        self._number += 1

    def mark(self, header: bytes) -> bytes | None:
        """A frame without a message; None: nothing was sent with this header."""
        if header != self._header or not self._number:
            return None
        return header + _NUMBER.pack(self._number, len(self._sender)) + self._sender


class Gaps:
    """Finds gaps between the frames that arrive in one mailbox."""

    def __init__(self, on_gap: OnGap) -> None:
        self._on_gap = on_gap
        self._last: dict[bytes, tuple[bytes, int]] = {}  # sender → the header and the number of its last frame

    def begin_of_message(self, frame: bytes) -> int | None:
        """Where the message of this frame begins; None: it has none, or follows a gap. Takes all frames of the current
        epoch in the order of their arrival. Raises ValueError if it has no number."""
        try:
            number, num_bytes = _NUMBER.unpack_from(frame, HEADER_BYTES)
        except struct.error:
            raise ValueError("it has no number") from None
        start = HEADER_BYTES + _NUMBER.size
        end = start + num_bytes
        if len(frame) < end:
            raise ValueError("it has no sender")
        header, sender, has_message = frame[:HEADER_BYTES], frame[start:end], len(frame) > end
        before, last = self._last.get(sender, (b"", 0))
        if before != header:
            last = 0
        if last == _LOST:
            return None
        if number != last + has_message:
            self._last[sender] = header, _LOST
            self._on_gap(sender.decode(errors="replace"))
            return None
        self._last[sender] = header, number
        return end if has_message else None
