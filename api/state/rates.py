"""Rates that all processes share, and the next server: once a second each process adds what was taken from its buckets.

A request therefore never waits for the database. Processes may allow a burst each before they hear of each other; what
is too much is a debt, so over time no key gets more than its rate. While the database fails, each process has rates of
its own.
"""

import asyncio
import contextlib
import time
from collections.abc import Callable, Mapping

import msgspec
from msgspec import Struct

from ..http.http_error import HttpError
from ..http.rate_limit import Bucket
from .database import Database
from .store import Store

SHARE_S = 1.0
_MAX_BYTES = 16 << 20


class Level(Struct, frozen=True, array_like=True):
    amount: float  # that can be taken; negative: a debt
    at: float  # seconds since 1970


_decoder = msgspec.msgpack.Decoder(dict[str, Level])


class SharedRates:
    def __init__(
        self, database: Database, buckets: Mapping[str, Bucket], clock: Callable[[], float] = time.time
    ) -> None:
        """`buckets`: of this process, by names that are the same in every process. `clock`: seconds since 1970."""
        self._store = Store(database, "rate", max_bytes=_MAX_BYTES)
        self.buckets = buckets  # may be replaced at any time
        self._clock = clock
        self._sharing = asyncio.Lock()
        self._stopping = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        if self.buckets and self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._share_on())

    async def stop(self) -> None:
        """Adds what was taken last."""
        self._stopping.set()
        if self._task is not None:
            await self._task

    async def share(self) -> None:
        """Brings the buckets of this process and what all have taken together. Raises HttpError 503."""
        async with self._sharing:
            await self._share()

    async def _share(self) -> None:
        buckets = self.buckets
        taken = {name: bucket.taken for name, bucket in buckets.items()}
        now = self._clock()
        levels: dict[str, Level] = {}

        def merge(value: bytes | None) -> bytes | None:
            levels.update({} if value is None else _decoder.decode(value))
            for name, bucket in buckets.items():
                full = float(bucket.per_minute)
                level = levels.pop(name, Level(full, now))
                amount = min(full, level.amount + max(0.0, now - level.at) * full / 60)
                amount = min(full, amount - taken[name])
                if amount < full:  # a full one needs no entry
                    levels[name] = Level(amount, now)
            return msgspec.msgpack.encode(levels) if levels else None

        await self._store.change(b"", "levels", merge)
        for name, bucket in buckets.items():
            level = levels.get(name)
            bucket.adopt(bucket.per_minute if level is None else level.amount, taken[name])

    async def _share_on(self) -> None:
        is_last = False
        while not is_last:
            is_last = self._stopping.is_set()
            with contextlib.suppress(HttpError):  # the database has logged why
                await self.share()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(SHARE_S):
                    await self._stopping.wait()
