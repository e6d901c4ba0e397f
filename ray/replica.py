"""One engine of a Ray Serve application: a server on a free port of its node, which the doors reach over HTTP.

The replica starts it, says every second that it is there, reports how busy it is, and drains it at the end: its open
streams end, or go on at another engine by the door's resume.
"""

import asyncio
import contextlib
import time
from collections.abc import Mapping
from typing import Any

from ..commands.metrics import Reading, quantile, read
from .engine_process import EngineProcess
from .inner_key import inner_key
from .policy import RUNNING, TTFT_MS, WAITING

ANNOUNCE_S = 1.0
LEAVE_S = 1.5  # until every door has heard that the engine leaves
STOP_S = 15.0  # on top of --drain-timeout, from SIGTERM to SIGKILL


class Engine:
    """The deployment's class. Serve creates and ends it."""

    async def __init__(self, settings: Mapping[str, Any], version: str, registry: Any) -> None:  # type: ignore[misc]
        """`settings`: of `pagewire serve`, by field name. `version`: is different from that of engines to replace.
        `registry`: a handle. Returns when the engine is ready. Raises StartError."""
        import ray

        keys = settings.get("api_key") or [inner_key()]
        host, head = ray.util.get_node_ip_address(), ray.get_runtime_context().gcs_address
        self._process = EngineProcess({**settings, "api_key": keys}, host=host, key=keys[0], head=head)
        self._registry = registry
        self._is_leaving = False
        self._last = Reading(0.0)
        await self._process.until_ready()
        self._announcing = asyncio.ensure_future(self._announce())

    async def _announce(self) -> None:
        while True:
            await self._say()
            await asyncio.sleep(ANNOUNCE_S)

    async def _say(self) -> None:
        with contextlib.suppress(Exception):  # the registry is being replaced; Ray raises many things
            async with asyncio.timeout(ANNOUNCE_S):  # without one, as of an application that is deleted, Ray waits
                await self._registry.announce.remote(self._process.url, self._is_leaving)

    async def check_health(self) -> None:
        """Serve replaces a replica whose check raises."""
        if not self._is_leaving:
            self._process.check()

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """What the policy reads."""
        process = self._process
        async with process.session.get(process.url + "/metrics", headers=process.headers) as response:
            reading = read(await response.text(), time.monotonic())
        ttft_s = quantile(self._last, reading, "time_to_first_token_seconds", 0.9)
        self._last = reading
        return {
            WAITING: reading.get("num_requests_waiting"),
            RUNNING: reading.get("num_requests_running"),
            TTFT_MS: (ttft_s or 0.0) * 1000,
        }

    async def __del__(self) -> None:
        """Serve awaits it before it ends the replica."""
        if self._is_leaving or not hasattr(self, "_announcing"):
            return
        self._is_leaving = True
        await self._say()
        await asyncio.sleep(LEAVE_S)
        await self._process.drain(STOP_S)
        self._announcing.cancel()
