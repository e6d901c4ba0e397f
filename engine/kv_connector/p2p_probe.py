"""One attempt to reach a peer, and how it went, of which ZeroMQ tells nobody but a monitor of the connection.

The events of a monitor have to be read: when some 2,000 of them are not, ZeroMQ's thread waits, and every connection of
its context with it. So connections that last have no monitor. A probe is a connection of its own that is tried once,
and has a handful of events whether anybody reads them or not.
"""

import time
from typing import Literal

import zmq
from zmq.utils.monitor import recv_monitor_message

from ...ipc.zmq_channel import Keys
from .p2p_settings import secure

Outcome = Literal["reached", "unreached", "refused", "broken off"]
"""broken off: during the handshake, by a peer with other keys, or one that has died at this moment."""

_OUTCOMES: dict[int, Outcome] = {
    zmq.EVENT_HANDSHAKE_SUCCEEDED: "reached",
    zmq.EVENT_HANDSHAKE_FAILED_AUTH: "refused",
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL: "refused",
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL: "broken off",
    zmq.EVENT_CLOSED: "unreached",  # before it was connected
    zmq.EVENT_DISCONNECTED: "unreached",  # before the handshake
}


class Probe:
    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", address: str, keys: Keys | None) -> None:
        """Raises ZMQError if there are too many sockets."""
        self.began_at = time.monotonic()  # s
        self._outcome: Outcome | None = None
        self._monitor: zmq.Socket[bytes] | None = None
        self._socket = context.socket(zmq.DEALER)
        try:
            self._socket.linger = 0
            self._monitor = self._socket.get_monitor_socket(sum(_OUTCOMES))
            secure(self._socket, address, keys, is_server=False)
            self._socket.reconnect_ivl = -1  # never
            self._socket.connect(address)
        except BaseException:
            self.close()
            raise

    def outcome(self) -> Outcome | None:
        """None: it is not known yet."""
        assert self._monitor is not None, "asked after `close`"
        while self._outcome is None and self._monitor.poll(0):
            self._outcome = _OUTCOMES[recv_monitor_message(self._monitor)["event"]]
        return self._outcome

    def close(self) -> None:
        self._socket.disable_monitor()
        if self._monitor is not None:
            self._monitor.close()
        self._socket.close()
