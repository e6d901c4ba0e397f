"""The interface of a mailbox, and the in-memory implementation.

An actor has exactly one mailbox, its `Inbox`; each sender has an `Outbox` for it. Messages are encoded in both
implementations, so the in-memory one refuses what ZeroMQ's would refuse. Bytes that do not decode as a message of the
mailbox are counted, logged once and dropped: a mistake of a peer never ends a process.
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
    """The receiver has not read its mailbox for so long that the queue is full."""


class Outbox(Protocol):
    """The sending end."""

    def send(self, message: Message) -> None:
        """Never blocks. Raises ChannelFull."""

    def close(self) -> None:
        """Closes after a moment for queued messages."""


class Inbox(Protocol[M]):
    """The receiving end: one owner, either an event loop (`subscribe`) or a plain loop (`wait`)."""

    num_undecodable: int
    has_more: bool  # `drain` stopped early: call it again, no event will follow

    def drain(self) -> list[M]:
        """All waiting messages, in order. Never blocks. A `Reset` is the first of its list."""

    def wait(self, timeout_s: float) -> bool:
        """Blocks until a message may be waiting. False after `timeout_s` seconds."""

    def subscribe(self, loop: asyncio.AbstractEventLoop, wake: Callable[[], None]) -> None:
        """Calls `wake` on the loop whenever a message may be waiting; the owner then drains."""

    def close(self) -> None:
        """Frees the address."""


class Decoding(Generic[M]):
    """Decodes messages; counts, logs and drops bytes that do not decode."""

    def __init__(self, accepts: object) -> None:
        self._decoder: Decoder[M] = Decoder(accepts)
        self.num_undecodable = 0

    def decode(self, data: bytes | memoryview) -> M | None:
        """The message, or None if the bytes are no message of this mailbox."""
        try:
            return self._decoder.decode(data)
        except DecodeError as error:
            self.undecodable(data, error)
            return None

    def undecodable(self, data: bytes | memoryview, error: Exception) -> None:
        if self.num_undecodable == 0:
            log.warning("dropped %d bytes that are not a message (%s); more are only counted", len(data), error)
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
        """Queues the message; the queue is not bounded."""
        self.send_bytes(encode(message))

    def send_bytes(self, data: bytes) -> None:
        self._queue.append(data)
        self._arrived.set()
        if self._wake is not None:
            self._wake()

    def drain(self) -> list[M]:
        self._arrived.clear()
        messages = []
        while self._queue:
            message = self.decode(self._queue.popleft())
            if message is not None:
                messages.append(message)
        return messages

    def wait(self, timeout_s: float) -> bool:
        return self._arrived.wait(timeout_s)

    def subscribe(self, loop: asyncio.AbstractEventLoop, wake: Callable[[], None]) -> None:
        self._wake = lambda: loop.call_soon_threadsafe(wake)
        if self._queue:
            self._wake()

    def close(self) -> None:
        self._wake = None
