"""A socket that peers connect to, and the thread that answers there.

Both halves of the p2p connector have one: the worker half where it serves blocks, the core half where it says where the
ranks are.
"""

import os
import threading
from collections.abc import Callable
from pathlib import Path

import zmq
from zmq.auth.thread import ThreadAuthenticator

from ...errors import ConfigError
from ...ipc.zmq_channel import Keys, admit_only
from .p2p_settings import check_free, secure
from .p2p_wire import MAX_REQUEST_BYTES

_MAX_QUEUED = 1024  # messages to an asker that reads nothing: pieces within its credit, and short ones


class Listener:
    def __init__(self, address: str, keys: Keys | None) -> None:
        """Raises ConfigError if the address cannot be bound."""
        check_free(address)
        self._path = Path(address.removeprefix("ipc://")) if address.startswith("ipc://") else None
        self._context = zmq.Context()
        self._authenticator: ThreadAuthenticator | None = None
        if keys is not None and self._path is None:
            self._authenticator = admit_only(self._context, keys)
        self.socket = self._context.socket(zmq.ROUTER)
        self.socket.linger = 0
        self.socket.maxmsgsize = MAX_REQUEST_BYTES
        self.socket.sndhwm = _MAX_QUEUED
        secure(self.socket, address, keys, is_server=True)
        umask = os.umask(0o177)
        try:
            self.socket.bind(address)
        except zmq.ZMQError as error:
            self._stop_authenticator()
            self._context.destroy(linger=0)
            raise ConfigError(f"--kv-connector p2p: cannot serve on {address}: {error}.") from error
        finally:
            os.umask(umask)
        self._end, self.ended = self._context.socket(zmq.PAIR), self._context.socket(zmq.PAIR)
        self.ended.bind("inproc://end")
        self._end.connect("inproc://end")
        self._thread: threading.Thread | None = None

    def start(self, run: Callable[[], None], name: str) -> None:
        """Starts the thread, which alone uses `socket` from now on. It closes it and `ended`, and returns, once there
        is something to read from `ended`. Called once."""
        self._thread = threading.Thread(target=run, name=name, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends the thread and removes the socket. A second call does nothing."""
        if self._context.closed:
            return
        assert self._thread is not None, "closed before it was started"
        self._end.send(b"")
        self._thread.join()
        self._end.close()
        self._stop_authenticator()
        self._context.term()
        if self._path is not None:
            self._path.unlink(missing_ok=True)

    def _stop_authenticator(self) -> None:
        if self._authenticator is not None:
            self._authenticator.stop()
            self._authenticator = None
