"""A socket that peers connect to, and the thread that answers there.

Both halves of the p2p connector have one: the worker half where it serves blocks, the core half where it says where the
ranks are.
"""

import logging
import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import zmq
from zmq.auth.thread import ThreadAuthenticator

from ...errors import ConfigError
from ...ipc.refusals import EVENTS, ZmqRefusals
from ...ipc.zmq_channel import Keys, admit_only
from .p2p_settings import check_free, secure
from .p2p_wire import MAX_REQUEST_BYTES

_MAX_QUEUED = 1024  # messages to an asker that reads nothing: pieces within its credit, and short ones
_MAX_STRANGERS = 64  # that are named

log = logging.getLogger("pagewire.kv_connector.p2p")


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
        self._address = address
        self._end, self._ended = self._context.socket(zmq.PAIR), self._context.socket(zmq.PAIR)
        self._ended.bind("inproc://end")
        self._end.connect("inproc://end")
        self._poller = zmq.Poller()
        self._poller.register(self.socket, zmq.POLLIN)
        self._poller.register(self._ended, zmq.POLLIN)
        self._refusals: ZmqRefusals | None = None
        self._strangers: set[str] = set()  # hosts that were refused, as the log has them
        if self._authenticator is not None:
            monitor = self.socket.get_monitor_socket(EVENTS)
            self._refusals = ZmqRefusals(monitor)
            self._poller.register(monitor, zmq.POLLIN)
        self._thread: threading.Thread | None = None

    def start(self, run: Callable[[], None], name: str) -> None:
        """Starts the thread, which alone uses `socket` and `wait` from now on. It returns once `wait` says that it is
        to end. Called once."""
        self._thread = threading.Thread(target=self._run, args=(run,), name=name, daemon=True)
        self._thread.start()

    def wait(self, timeout_ms: int | None = None) -> bool | None:
        """Whether a message can be received, after this time at the latest; None: the thread is to end."""
        ready = dict(self._poller.poll(timeout_ms))
        if self._ended in ready:
            return None
        if self._refusals is not None:
            self._name_strangers(self._refusals.look())
        return self.socket in ready

    def _run(self, run: Callable[[], None]) -> None:
        with self.socket, self._ended:
            try:
                run()
            finally:
                if self._refusals is not None:
                    self.socket.disable_monitor()
                    self._refusals.close()

    def _name_strangers(self, hosts: Sequence[str]) -> None:
        """Tells the log once of each host that was refused. It does not know why itself."""
        for host in hosts:
            if host not in self._strangers and len(self._strangers) < _MAX_STRANGERS:
                self._strangers.add(host)
                log.warning("%s was refused at %s: its key-file is not the one here", host, self._address)

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
