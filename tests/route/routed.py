"""A real router in front of real api servers with fake engines, all in threads of the test."""

import asyncio
import http.client
import json
import socket
import threading
import urllib.error
import urllib.request
from collections.abc import Callable
from typing import Any

from harness import FakeEngine, http_config
from served import Served
from waiting import until

from pagewire.config.access import ApiKey
from pagewire.procs.listening import Listening
from pagewire.route.config import RouteConfig
from pagewire.route.serve import RouterServer


class MortalEngine(FakeEngine):
    """An engine whose server closes every connection after `dies_at` pieces of a stream."""

    def __init__(self, pieces: list[str], *, dies_at: int | None = None) -> None:
        super().__init__(pieces)
        self.dies_at = dies_at
        self.on_death: Callable[[], None] = lambda: None

    def _step(self) -> None:
        if self.dies_at is not None and any(step == self.dies_at for _, step in self.open.values()):
            self.open.clear()
            self.on_death()
        else:
            super()._step()


class Behind(Served):
    """An engine's server that can close its connections as a killed process does."""

    def __init__(self, engine: FakeEngine, listener: socket.socket | None = None, **config: Any) -> None:
        super().__init__(listener, engine=engine, **config)
        self.address = f"http://127.0.0.1:{self.port}"
        if isinstance(engine, MortalEngine):
            engine.on_death = self.abort

    def __enter__(self) -> "Behind":
        return self

    def abort(self) -> None:
        """Close every listener and connection; called on the server's thread."""
        for server in self._server.servers:
            server.close()
        for connection in list(self._server.server_state.connections):
            connection.transport.abort()


class Answered:
    """The answer that a client received."""

    def __init__(self, status: int, headers: dict[str, str], body: bytes) -> None:
        self.status = status
        self.headers = {name.lower(): value for name, value in headers.items()}
        self.body = body

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def code(self) -> str | None:
        code: str | None = self.json["error"]["code"]
        return code

    @property
    def events(self) -> list[Any]:
        *blocks, rest = self.body.decode().split("\n\n")
        assert rest == ""
        lines = [block.removeprefix("data: ") for block in blocks]
        return [line if line == "[DONE]" else json.loads(line) for line in lines]

    @property
    def text(self) -> str:
        """The text of a streamed completion, which must have ended without an error."""
        assert self.status == 200 and self.events[-1] == "[DONE]", self.body
        return "".join(choice["text"] for event in self.events[:-1] for choice in event["choices"])


class Routed:
    """A running router, which the context manager stops."""

    def __init__(self, *engines: Behind | str, wait: bool = True, **config: Any) -> None:
        urls = tuple(engine.address if isinstance(engine, Behind) else engine for engine in engines)
        keys = tuple(ApiKey(key) if isinstance(key, str) else key for key in config.pop("api_keys", ()))
        admin_keys = tuple(map(ApiKey, config.pop("admin_keys", ())))
        own = {name: config.pop(name) for name in RouteConfig.__struct_fields__ if name in config}
        http = http_config(**{"access_log": False, **config}, api_keys=keys, admin_keys=admin_keys)
        self._config = RouteConfig(http=http, engines=urls, **own)
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()))
        self._thread.start()
        assert self._ready.wait(10)
        if wait:
            self.wait_ready(len(urls))

    async def _run(self) -> None:
        self.loop = asyncio.get_running_loop()
        self._end = asyncio.Event()
        listening = Listening(self._config.http.listen)
        self.server = RouterServer(self._config, listening)
        self.url = self.server.url
        self.server.start()
        await self.server.open()
        self._ready.set()
        await self._end.wait()
        await self.server.close(self._config.http.service.drain_timeout)
        listening.close()

    def __enter__(self) -> "Routed":
        return self

    def __exit__(self, *_: object) -> None:
        self.loop.call_soon_threadsafe(self._end.set)
        self._thread.join(20)
        assert not self._thread.is_alive()

    def wait_ready(self, num: int) -> None:
        until(
            lambda: sum(engine.is_able for engine in self.server.fleet.engines) == num,
            lambda: f"{num} engines are ready: {[engine.state() for engine in self.server.fleet.engines]}",
        )

    def begin(
        self, path: str, body: Any = None, *, method: str | None = None, **headers: str
    ) -> http.client.HTTPResponse:
        """An answer that has begun, for the caller to read and close. Raises HTTPError for a status of an error."""
        data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        sent = {"Content-Type": "application/json"} | {name.replace("_", "-"): text for name, text in headers.items()}
        request = urllib.request.Request(self.url + path, data, sent, method=method)
        answer: http.client.HTTPResponse = urllib.request.urlopen(request, timeout=20)
        return answer

    def ask(self, path: str, body: Any = None, *, method: str | None = None, **headers: str) -> Answered:
        try:
            with self.begin(path, body, method=method, **headers) as response:
                return Answered(response.status, dict(response.headers), response.read())
        except urllib.error.HTTPError as error:
            with error:
                return Answered(error.code, dict(error.headers), error.read())

    def complete(self, **fields: Any) -> Answered:
        return self.ask("/v1/completions", {"prompt": "abc", **fields})

    def metric(self, name: str) -> float:
        lines = self.ask("/metrics").body.decode().splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(f"pagewire_router_{name}"))
