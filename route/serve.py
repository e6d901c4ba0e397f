"""The router's process: starts, listens, and stops on a signal."""

import asyncio
import contextlib
import logging
import os
import resource
import signal
import socket
import sys
from collections.abc import Coroutine

from ..api.http.server import HttpServer, UvicornConfig
from ..procs.listening import Listening, shown_address
from .app import RouterApp
from .config import RouteConfig
from .engines import Fleet

_REASON = "The server is shutting down."
_CLOSE_TIMEOUT_S = 3.0  # for connections to take their last bytes


class RouterServer:
    """A router that listens on a socket."""

    def __init__(self, config: RouteConfig, listening: Listening) -> None:
        """Call it on the event loop that serves. Raises ConfigError."""
        self._http = config.http
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        if soft != hard:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))  # a connection is a descriptor
        logging.getLogger("uvicorn").setLevel(
            logging.ERROR
        )  # it warns of bytes that are not HTTP, which anyone can send
        self.fleet = Fleet(config.engines, cacert=config.cacert, keys=[key.key for key in config.http.api_keys])
        self._app = RouterApp(self.fleet, config)
        self._edge = self._app.edge()
        self._server = HttpServer(UvicornConfig(self._edge, config.http))
        self._socket = socket.socket(fileno=os.dup(listening.fd))
        self._serving: asyncio.Task[None] | None = None

    @property
    def url(self) -> str:
        return shown_address(self._http.listen, self._socket)

    @property
    def is_open(self) -> bool:
        return self._serving is not None

    def start(self) -> None:
        """Begins to poll the engines."""
        self._edge.start()

    async def open(self) -> None:
        """Listens."""
        self._serving = asyncio.create_task(self._server.serve(sockets=[self._socket]))
        while not (self._server.started or self._serving.done()):
            await asyncio.sleep(0.001)  # uvicorn has no callback

    async def close(self, grace_s: float) -> None:
        """Refuses new requests, lets open ones go on for `grace_s`, and ends the rest."""
        self._app.refuse(_REASON)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(grace_s):
                await self._app.drained()
        self._app.close()
        self._server.should_exit = True
        if self._serving is not None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_CLOSE_TIMEOUT_S):
                    await asyncio.shield(self._serving)
        await self._edge.stop()


async def run(config: RouteConfig) -> int:
    """`pagewire route`. The exit code. Raises ConfigError."""
    listening = Listening(config.http.listen)
    signals = Signals()
    try:
        server = RouterServer(config, listening)
        server.start()
        await server.open()
        print(
            f"pagewire routes to {len(config.engines)} engines\nlistening on {server.url}", file=sys.stderr, flush=True
        )
        await signals.first()
        return 0 if await signals.unless_again(server.close(config.http.service.drain_timeout)) else 130
    finally:
        listening.close()


class Signals:
    """Counts SIGINT and SIGTERM: the first one drains and stops, a second SIGINT stops at once."""

    def __init__(self) -> None:
        self._seen: list[signal.Signals] = []
        self._woken = asyncio.Event()
        for signum in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(signum, self._on_signal, signum)

    @property
    def num(self) -> int:
        return len(self._seen)

    async def first(self) -> signal.Signals:
        while not self._seen:
            self._woken.clear()
            await self._woken.wait()
        return self._seen[0]

    async def unless_again(self, ending: Coroutine[object, object, None]) -> bool:
        """Runs `ending`. False if a second SIGINT came before its end."""
        num_seen = len(self._seen)
        task = asyncio.ensure_future(ending)
        while not task.done():
            self._woken.clear()
            waiting = asyncio.ensure_future(self._woken.wait())
            await asyncio.wait((task, waiting), return_when=asyncio.FIRST_COMPLETED)
            waiting.cancel()
            if signal.SIGINT in self._seen[num_seen:]:
                print("pagewire: stopped at once", file=sys.stderr)
                task.cancel()
                return False
        task.result()
        return True

    def _on_signal(self, signum: signal.Signals) -> None:
        self._seen.append(signum)
        self._woken.set()
