"""One engine of a Ray Serve application: a server on a free port of its node, which the doors reach over HTTP.

The replica starts it, says every second that it is there, reports how busy it is, and drains it at the end: its open
streams end, or go on at another engine by the door's resume.
"""

import asyncio
import contextlib
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import aiohttp

from ..commands.metrics import Reading, quantile, read
from ..errors import StartError
from ..procs import interpreter
from ..procs.machine import listen
from .inner_key import inner_key
from .policy import RUNNING, TTFT_MS, WAITING

ANNOUNCE_S = 1.0
LEAVE_S = 1.5  # until every door has heard that the engine leaves
STOP_S = 15.0  # on top of --drain-timeout, from SIGTERM to SIGKILL
_POLL_S = 0.1
_CHECK_S = 5.0  # limit of a question to the engine
_TAIL = 4000  # characters of its output that an error quotes


class Engine:
    """The deployment's class. Serve creates and ends it."""

    async def __init__(self, settings: Mapping[str, Any], version: str, registry: Any) -> None:  # type: ignore[misc]
        """`settings`: of `pagewire serve`, by field name. `version`: is different from that of engines to replace.
        `registry`: a handle. Returns when the engine is ready. Raises StartError."""
        import ray

        host = ray.util.get_node_ip_address()
        with listen(host) as probe:
            port = probe.getsockname()[1]
        self._url = f"http://{host}:{port}"
        keys = settings.get("api_key") or [inner_key()]
        self._key = keys[0]
        self._registry = registry
        self._drain_s = float(settings.get("drain_timeout", 60.0))
        self._is_leaving = False
        self._last: Reading | None = None
        # The proxies of an operator are for the outside.
        self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=_CHECK_S), trust_env=False)
        self._log = Path(f"/tmp/pagewire-{os.getpid()}-{port}.log")
        self._process = self._start({**settings, "api_key": keys, "host": host, "port": port})
        await self._until_ready(float(settings.get("start_timeout_s", 600.0)))
        self._announcing = asyncio.ensure_future(self._announce())

    def _start(self, settings: Mapping[str, object]) -> "subprocess.Popen[bytes]":
        environment = interpreter.environment(interpreter.HUB_TOKENS)
        environment.pop("OMP_NUM_THREADS", None)  # Ray's: one for each CPU of the replica
        with self._log.open("wb") as log:
            process = subprocess.Popen(
                [*interpreter.COMMAND, "pagewire.ray.engine"],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                env=environment,
                start_new_session=True,
            )
        assert process.stdin is not None
        process.stdin.write(json.dumps(settings).encode() + b"\n")
        process.stdin.flush()  # and stays open: its end is the end of this process
        return process

    async def _until_ready(self, limit_s: float) -> None:
        deadline = time.monotonic() + limit_s
        while not await self._is_ready():
            if self._process.poll() is not None or time.monotonic() > deadline:
                said = self._log.read_text(errors="replace")[-_TAIL:].strip()
                await self._end(0.0)
                raise StartError(f"The engine did not start: {said or f'it was not ready in {limit_s:g} s'}")
            await asyncio.sleep(_POLL_S)

    async def _is_ready(self) -> bool:
        with contextlib.suppress(aiohttp.ClientError, OSError, TimeoutError):
            async with self._session.get(self._url + "/ready") as response:
                return response.status == 200
        return False

    async def _announce(self) -> None:
        while True:
            with contextlib.suppress(Exception):  # the registry is being replaced; Ray raises many things
                await self._registry.announce.remote(self._url, self._is_leaving)
            await asyncio.sleep(ANNOUNCE_S)

    async def check_health(self) -> None:
        """Serve replaces a replica whose check raises. The engine heals by itself as long as its process lives."""
        if self._process.poll() is not None and not self._is_leaving:
            raise StartError(f"The engine has ended with exit code {self._process.returncode}.")

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """What the policy reads."""
        headers = {"Authorization": f"Bearer {self._key}"}
        async with self._session.get(self._url + "/metrics", headers=headers) as response:
            reading = read(await response.text(), time.monotonic())
        before, self._last = self._last or Reading(0.0), reading
        ttft_s = quantile(before, reading, "time_to_first_token_seconds", 0.9)
        return {
            WAITING: reading.get("num_requests_waiting"),
            RUNNING: reading.get("num_requests_running"),
            TTFT_MS: 0.0 if ttft_s is None or math.isnan(ttft_s) else ttft_s * 1000,
        }

    async def url(self) -> str:
        """Where its doors reach it."""
        return self._url

    async def __del__(self) -> None:
        """Serve awaits it before it ends the replica."""
        if self._is_leaving or not hasattr(self, "_announcing"):
            return
        self._is_leaving = True
        with contextlib.suppress(Exception):
            await self._registry.announce.remote(self._url, True)
        await asyncio.sleep(LEAVE_S)
        await self._end(self._drain_s + STOP_S)
        self._announcing.cancel()

    async def _end(self, grace_s: float) -> None:
        """SIGTERM, and SIGKILL after `grace_s`."""
        deadline = time.monotonic() + grace_s
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
        while self._process.poll() is None and time.monotonic() < deadline:
            await asyncio.sleep(_POLL_S)
        if self._process.poll() is None:
            self._process.kill()
        await self._session.close()
        print(self._log.read_text(errors="replace")[-_TAIL:], file=sys.stderr)
        self._log.unlink(missing_ok=True)
