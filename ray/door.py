"""The ingress of a Ray Serve application: the router, whose engines come and go.

It is an ASGI application that Serve's proxy calls. It reaches the engines over HTTP and not through Serve, so streams
are journaled and resumed as behind `pagewire route`.
"""

import asyncio
import contextlib
import time
from typing import Any

from starlette.types import Receive, Scope, Send

from ..api.app import Edge
from ..config.config import HttpConfig
from ..route.app import RouterApp
from ..route.config import RouteConfig
from ..route.engines import Fleet
from .inner_key import inner_key
from .roster import Roster

POLL_S = 0.5


class Door:
    """An ASGI application that Serve copies to each replica, which starts it on its event loop (lifespan)."""

    def __init__(self, http: HttpConfig) -> None:
        self._http = http
        self._key = ""  # that the engines accept
        self._edge: Edge | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._live(receive, send)
        elif scope["type"] == "http":
            assert self._edge is not None
            if not self._http.api_keys:  # else the engines know the clients' keys, which keep their caches apart
                headers = [(name, value) for name, value in scope["headers"] if name.lower() not in _KEY_HEADERS]
                scope = {**scope, "headers": [*headers, (b"authorization", b"Bearer " + self._key.encode())]}
            await self._edge(scope, receive, send)

    async def _live(self, receive: Receive, send: Send) -> None:
        """From the start of the application to its end."""
        await receive()
        keys = [key.key for key in self._http.api_keys] or [inner_key()]
        self._key = keys[0]
        fleet = Fleet((), keys=keys)
        self._edge = RouterApp(fleet, RouteConfig(http=self._http, engines=())).edge()
        self._edge.start()
        following = asyncio.ensure_future(self._follow(fleet))
        await send({"type": "lifespan.startup.complete"})
        await receive()
        following.cancel()
        await self._edge.stop()
        await send({"type": "lifespan.shutdown.complete"})

    async def _follow(self, fleet: Fleet) -> None:
        """Adds and removes engines as they say."""
        from ray import serve

        roster = Roster()
        removals: set[asyncio.Task[None]] = set()
        registry: Any = None
        while True:
            with contextlib.suppress(Exception):  # the registry is being replaced; Ray raises many things
                registry = registry or serve.get_deployment_handle("Registry")
                said = await registry.engines.remote()
                added, removed = roster.hear(said, time.monotonic())
                for url in added:
                    fleet.add(url)
                for engine in [engine for url in removed if (engine := fleet.find(url)) is not None]:
                    removal = asyncio.create_task(fleet.remove(engine))
                    removals.add(removal)
                    removal.add_done_callback(removals.discard)
            await asyncio.sleep(POLL_S)


_KEY_HEADERS = (b"authorization", b"x-api-key")
