"""A connection to a mailbox of another launch that notices when the process behind it has ended.

A process that ends closes its connections; one that is frozen, or whose machine is lost, stops answering ZMTP's
heartbeats. ZeroMQ's thread inside the process answers these, so a process that computes or loads is not taken for dead.
A process whose own loop hangs is not noticed here but by the supervisor of its launch.
"""

import asyncio
from collections.abc import Callable

import zmq
from zmq.utils.monitor import parse_monitor_message

from .codec import encode
from .messages import Message

EVENTS = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED


class ZmqWatch:
    """Watches one mailbox, which need not exist yet. A mailbox that was never reached is not lost."""

    def __init__(self, socket: "zmq.SyncSocket", monitor: "zmq.SyncSocket", header: bytes) -> None:
        """`socket`: connected, with heartbeats. `monitor`: reports its `EVENTS`. `header`: of every frame."""
        self._socket = socket
        self._monitor = monitor
        self._header = header
        self._loop: asyncio.AbstractEventLoop | None = None
        self.is_up = False  # reached, and not lost since
        self.is_lost = False  # for good: messages to it may be lost as well

    def subscribe(self, loop: asyncio.AbstractEventLoop, wake: Callable[[], None]) -> None:
        """Calls `wake` on the loop whenever `look` may find something."""
        self._loop = loop
        loop.add_reader(int(self._monitor.fd), wake)
        loop.call_soon(wake)

    def look(self) -> None:
        """Updates `is_up` and `is_lost`."""
        while True:
            try:
                event = parse_monitor_message(self._monitor.recv_multipart(zmq.DONTWAIT))["event"]
            except zmq.Again:
                return
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self.is_up = not self.is_lost
            elif self.is_up:
                self.is_up, self.is_lost = False, True

    def send(self, message: Message) -> None:
        """Queues a message."""
        self._socket.send(self._header + encode(message), zmq.DONTWAIT)

    def close(self) -> None:
        """Closes the connection after a moment for queued messages."""
        if self._loop is not None:
            self._loop.remove_reader(int(self._monitor.fd))
            self._loop = None
        self._socket.disable_monitor()
        self._monitor.close()
        self._socket.close()
