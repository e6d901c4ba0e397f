"""A real uvicorn with the whole application on a thread of its own, over the fake engine."""

import asyncio
import contextlib
import socket
import threading
from typing import Any

from harness import FakeEngine, make_app, split_settings
from waiting import until

from pagewire.api.app import Edge
from pagewire.api.http.server import HttpServer, UvicornConfig


class Served:
    """Stops with `stop` or at the end of a `with` block."""

    def __init__(
        self, listener: socket.socket | None = None, *, engine: FakeEngine | None = None, **config: Any
    ) -> None:
        """`listener`: a bound socket; default: a free port. `config`: differences from `CONFIG`."""
        self.engine = engine or FakeEngine(["Hel", "lo ", "🙂"])
        self._socket = listener or socket.create_server(("127.0.0.1", 0))
        self._socket.listen()
        self.port: int = 0 if self._socket.family == socket.AF_UNIX else self._socket.getsockname()[1]
        self.edge: Edge = make_app(self.engine, **config)
        self._config = UvicornConfig(self.edge, split_settings({**config, "api_keys": ()})[1])
        self._server = HttpServer(self._config)
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        # Earlier connections would lack the options that the server sets on its socket.
        until(lambda: self._server.started or not self._thread.is_alive(), "the server has started")
        assert self._thread.is_alive()

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=self._config.get_loop_factory()) as runner:
            runner.run(self._server.serve(sockets=[self._socket]))

    def __enter__(self) -> "Served":
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        self._server.should_exit = True
        self._thread.join(20)
        assert not self._thread.is_alive()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=10)

    def raw(self, data: bytes) -> bytes:
        """Sends `data`; returns everything that arrives until the server closes the connection."""
        with self.connect() as connection:
            received = b""
            with contextlib.suppress(ConnectionResetError, BrokenPipeError):
                connection.sendall(data)
            with contextlib.suppress(ConnectionResetError):
                while part := connection.recv(65536):
                    received += part
            return received
