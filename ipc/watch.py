"""A connection to a mailbox of another launch that tells when the process behind it has ended.

A process that ends closes its connections; one whose machine is gone, or that is frozen, stops answering ZMTP's own
heartbeats. These are answered by ZeroMQ's thread inside the process, so one that computes, or loads a model, is not
taken for dead. One whose own loop hangs is not noticed here: that is for the supervisor beside it.
"""

import asyncio
from collections.abc import Callable

import zmq
from zmq.utils.monitor import parse_monitor_message

from .codec import encode
from .messages import Message

EVENTS = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED


class ZmqWatch:
    """Over one mailbox, which need not exist yet. What has never been reached is not lost."""

    def __init__(self, socket: "zmq.SyncSocket", monitor: "zmq.SyncSocket", header: bytes) -> None:
        """`socket`: connected, with heartbeats. `monitor`: tells of its `EVENTS`. `header`: of every frame."""
        self._socket = socket
        self._monitor = monitor
        self._header = header
        self._loop: asyncio.AbstractEventLoop | None = None
        self.is_up = False  # it has been reached, and not been lost
        self.is_lost = False  # for good: what was on its way to it may be lost, too

    def subscribe(self, loop: asyncio.AbstractEventLoop, wake: Callable[[], None]) -> None:
        """Calls `wake` on the loop whenever `look` may find something."""
        self._loop = loop
        loop.add_reader(int(self._monitor.fd), wake)
        loop.call_soon(wake)

    def look(self) -> None:
        """Takes in what has happened to the connection."""
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
        """Queues a message, one of a few in its life."""
        self._socket.send(self._header + encode(message), zmq.DONTWAIT)

    def close(self) -> None:
        """Sends what is queued, for a moment, and lets go."""
        if self._loop is not None:
            self._loop.remove_reader(int(self._monitor.fd))
            self._loop = None
        self._socket.disable_monitor()
        self._monitor.close()
        self._socket.close()
