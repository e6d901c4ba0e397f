"""What a mailbox is, whatever carries it, and the in-memory kind.

An actor has exactly one mailbox, its `Inbox`; whoever wants to tell it something has an `Outbox` for it. Messages cross
as bytes in both kinds, so the in-memory one refuses what the real one would refuse. Bytes that are no message of the
mailbox are counted, logged once and dropped: a peer's mistake never ends a process.
"""

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from .codec import DecodeError, Decoder, encode
from .messages import Message

M = TypeVar("M")
log = logging.getLogger("pagewire.ipc")


class ChannelFull(Exception):
    """The receiver has not taken a message for so long that nothing more fits."""


class Outbox(Protocol):
    """The sending end."""

    def send(self, message: Message) -> None:
        """Never blocks. Raises ChannelFull."""

    def close(self) -> None:
        """Sends what is queued, for a moment, and lets go."""


class Inbox(Protocol[M]):
    """The receiving end: one owner, either an event loop (`subscribe`) or a plain loop (`wait`)."""

    num_undecodable: int
    has_more: bool  # `drain` has stopped before everything was handed out: call it again, nothing will wake you

    def drain(self) -> list[M]:
        """Everything that waits, in order, possibly nothing. Never blocks. A `Reset` comes first in its list."""

    def wait(self, timeout_s: float) -> bool:
        """Blocks until something may wait; False after `timeout_s` seconds without."""

    def subscribe(self, loop: asyncio.AbstractEventLoop, wake: Callable[[], None]) -> None:
        """Calls `wake` on the loop whenever something may wait. The owner then drains until nothing is left."""

    def close(self) -> None:
        """Lets go of the address."""


class Decoding(Generic[M]):
    """Bytes to messages with the rule for bytes that are none."""

    def __init__(self, accepts: object) -> None:
        self._decoder: Decoder[M] = Decoder(accepts)
        self.num_undecodable = 0

    def decode(self, data: bytes | memoryview) -> M | None:
        """The message, or None if the bytes are none of this mailbox."""
        try:
            return self._decoder.decode(data)
        except DecodeError as error:
            self.undecodable(data, error)
            return None

    def undecodable(self, data: bytes | memoryview, error: Exception) -> None:
        """Counts bytes that are dropped."""
        if self.num_undecodable == 0:
            log.warning("dropped %d bytes that are no message (%s); further ones are only counted", len(data), error)
        self.num_undecodable += 1


class MemoryChannel(Decoding[M]):
    """Both ends of a mailbox inside one process. Any thread may send."""

    def __init__(self, accepts: object) -> None:
        super().__init__(accepts)
        self._queue: deque[bytes] = deque()
        self._arrived = threading.Event()
        self.has_more = False
        self._wake: Callable[[], object] | None = None

    def send(self, message: Message) -> None:
        """Queues the message's bytes; there is no bound."""
        self.send_bytes(encode(message))

    def send_bytes(self, data: bytes) -> None:
        """Queues bytes as they are."""
        self._queue.append(data)
        self._arrived.set()
        if self._wake is not None:
            self._wake()

    def drain(self) -> list[M]:
        """See `Inbox`."""
        self._arrived.clear()
        messages = []
        while self._queue:
            message = self.decode(self._queue.popleft())
            if message is not None:
                messages.append(message)
        return messages

    def wait(self, timeout_s: float) -> bool:
        """See `Inbox`."""
        return self._arrived.wait(timeout_s)

    def subscribe(self, loop: asyncio.AbstractEventLoop, wake: Callable[[], None]) -> None:
        """See `Inbox`."""
        self._wake = lambda: loop.call_soon_threadsafe(wake)
        if self._queue:
            self._wake()

    def close(self) -> None:
        """See `Inbox`."""
        self._wake = None
