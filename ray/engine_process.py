"""An engine as a child of an actor: a server on a free port of the node. For `replica.py` and `serve_llm.py`."""

import asyncio
import contextlib
import json
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from typing import Any

import aiohttp

from ..errors import StartError
from ..procs import interpreter
from ..procs.machine import listen

_POLL_S = 0.1
_ASK_S = 5.0  # limit of a question about the engine
_TAIL = 4000  # characters of its output that an error quotes


class EngineProcess:
    """It runs from the first line on. Call everything on one event loop."""

    def __init__(self, settings: Mapping[str, Any], *, host: str, key: str, head: str = "") -> None:
        """`settings`: of `pagewire serve`, by field name. `key`: one of its API keys. `head`: of the Ray cluster,
        HOST:PORT, for an engine whose ranks Ray places."""
        with listen(host) as probe:
            port = probe.getsockname()[1]
        self.url = f"http://{host}:{port}"
        self.headers = {"Authorization": f"Bearer {key}"}
        self.session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=_ASK_S), trust_env=False)
        self._drain_s = float(settings.get("drain_timeout", 60.0))
        self._start_s = float(settings.get("start_timeout_s", 600.0))
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 (`_end` closes it)
        environment = interpreter.environment(interpreter.HUB_TOKENS)
        environment.pop("OMP_NUM_THREADS", None)  # Ray's: one for each CPU of the actor
        if head:
            environment["RAY_ADDRESS"] = head
        self._process = subprocess.Popen(
            [*interpreter.COMMAND, "pagewire.ray.engine"],
            stdin=subprocess.PIPE,
            stdout=self._log,
            stderr=self._log,
            env=environment,
            start_new_session=True,
        )
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({**settings, "host": host, "port": port}).encode() + b"\n")
        self._process.stdin.flush()  # and stays open: its end is the end of this process

    async def until_ready(self) -> None:
        """Raises StartError, after which the process has ended."""
        deadline = time.monotonic() + self._start_s
        while not await self.is_ready():
            if self._process.poll() is not None or time.monotonic() > deadline:
                said = self._said() or f"it was not ready in {self._start_s:g} s"
                await self._end(0.0)
                raise StartError(f"The engine did not start: {said}")
            await asyncio.sleep(_POLL_S)

    async def is_ready(self) -> bool:
        with contextlib.suppress(aiohttp.ClientError, OSError, TimeoutError):
            async with self.session.get(self.url + "/ready") as response:
                return response.status == 200
        return False

    def check(self) -> None:
        """Raises StartError if the process has ended. It heals by itself as long as it lives."""
        if self._process.poll() is not None:
            raise StartError(f"The engine has ended with exit code {self._process.returncode}.")

    async def drain(self, more_s: float) -> None:
        """SIGTERM, and SIGKILL after --drain-timeout and `more_s`."""
        await self._end(self._drain_s + more_s)

    async def _end(self, grace_s: float) -> None:
        deadline = time.monotonic() + grace_s
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
        while self._process.poll() is None and time.monotonic() < deadline:
            await asyncio.sleep(_POLL_S)
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        await self.session.close()
        print(self._said(), file=sys.stderr)
        self._log.close()

    def _said(self) -> str:
        """The end of its output."""
        end = self._log.seek(0, 2)
        self._log.seek(max(0, end - _TAIL))
        return self._log.read().decode(errors="replace").strip()
