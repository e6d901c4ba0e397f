"""Who was refused at an address because it has other keys. ZeroMQ drops such a peer without a word to anyone.

If only one side has keys, either may be the first to give up, so such a peer is not noticed.
"""

import asyncio
import os
import socket
from collections.abc import Callable

import zmq
from zmq.utils.monitor import parse_monitor_message

EVENTS = (
    zmq.EVENT_ACCEPTED | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_DISCONNECTED
)

_IPV4_MAPPED = "::ffff:"  # begins the address of a peer that uses IPv4, at a socket for both


class ZmqRefusals:
    """Watches one bound socket."""

    def __init__(self, monitor: "zmq.SyncSocket") -> None:
        """`monitor`: reports the `EVENTS` of the socket."""
        self._monitor = monitor
        self._hosts: dict[int, str] = {}  # descriptor of an open connection → its peer
        self._has_failed = False  # the connection of the next `EVENT_DISCONNECTED`, because of its keys
        self._loop: asyncio.AbstractEventLoop | None = None

    def subscribe(self, loop: asyncio.AbstractEventLoop, wake: Callable[[], None]) -> None:
        """Calls `wake` on the loop whenever `look` may find something."""
        self._loop = loop
        loop.add_reader(int(self._monitor.fd), wake)
        loop.call_soon(wake)

    def look(self) -> list[str]:
        """The hosts that were refused since the last call, as far as they are known; one may come several times."""
        refused: list[str] = []
        while True:
            try:
                event = parse_monitor_message(self._monitor.recv_multipart(zmq.DONTWAIT))
            except zmq.Again:
                return refused
            match event["event"]:
                case zmq.EVENT_ACCEPTED:
                    self._hosts[event["value"]] = _host_of(event["value"])
                case zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL:
                    self._has_failed = event["value"] == zmq.PROTOCOL_ERROR_ZMTP_CRYPTOGRAPHIC
                case zmq.EVENT_HANDSHAKE_FAILED_AUTH:
                    self._has_failed = True
                case zmq.EVENT_DISCONNECTED:  # follows at once, and says whose it was
                    host = self._hosts.pop(event["value"], "")
                    if self._has_failed and host:
                        refused.append(host)
                    self._has_failed = False

    def close(self) -> None:
        if self._loop is not None:
            self._loop.remove_reader(int(self._monitor.fd))
            self._loop = None
        self._monitor.close()


def _host_of(fd: int) -> str:
    """The peer of a connection of ZeroMQ's, which may have ended; then empty. It connects again soon."""
    try:
        with socket.socket(fileno=os.dup(fd)) as connection:
            name = connection.getpeername()
    except OSError:
        return ""
    return str(name[0]).removeprefix(_IPV4_MAPPED) if isinstance(name, tuple) else ""
