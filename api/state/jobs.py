"""Work that goes on without its client: which of it is open, and which process does it.

A job is in the database until its work has ended. The process that does it has a lease, which it renews. When a process
stops, or its lease has lapsed because it died, another one takes the job: one that shares the file, or the next server.
So a work must be able to go on where an earlier one has ended, and no result of it may count twice.
"""

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import Awaitable, Callable
from enum import Enum, auto
from typing import Protocol

from msgspec import Struct
from msgspec.structs import replace

from ..http.http_error import HttpError, as_http_error
from .database import Database
from .records import Records

LEASE_S = 15.0
LOOK_S = 1.0
MAX_DEATHS = 3  # of processes that did a job; what happens then is the work's
_MAX_BYTES = 64 << 20
_POLL_S = 0.1

Key = tuple[bytes, str]
"""Owner and id of a job."""

log = logging.getLogger(__name__)


class Job(Struct, frozen=True, array_like=True):
    work: str
    holder: bytes = b""  # the process that does it; empty: none
    until: float = 0.0  # end of its lease, in seconds since 1970
    is_cancelled: bool = False
    num_deaths: int = 0  # processes that did it and let their lease lapse


class Doing:
    """A job that this process does."""

    def __init__(self, job: Job) -> None:
        self.num_deaths = job.num_deaths
        self.is_cancelled = job.is_cancelled
        self.has_begun = False  # a task that has not would never hear of a cancel
        self.task: asyncio.Task[None] | None = None

    def cancel(self) -> None:
        """Tells the work that the client wants no more of it."""
        if not self.is_cancelled:
            self.is_cancelled = True
            if self.has_begun and self.task is not None:
                self.task.cancel()


class Work(Protocol):
    """Does a job and returns when it has ended. `doing` says whether it is cancelled, which may also be known at the
    beginning; a CancelledError without that leaves the job to another process, as does a database that fails."""

    async def __call__(self, owner: bytes, id: str, doing: Doing) -> None: ...


class Ended(Enum):
    """How the work on a job ended, if it did not fail."""

    DONE = auto()
    EXPIRED = auto()
    CANCELLED = auto()


async def end_of(work: Callable[[], Awaitable[None]], doing: Doing, *, until: float, name: str) -> Ended | HttpError:
    """Does a work until it ends, its client cancels it, or the time `until` (seconds since 1970) has come. An HttpError
    says why it failed. Raises what leaves the job to another process: a CancelledError that the client did not ask for,
    and the HttpError of a database that fails."""
    if doing.num_deaths >= MAX_DEATHS:
        return HttpError(500, f"{MAX_DEATHS} processes have died while they answered this {name}.")
    was_cancelled = doing.is_cancelled
    if was_cancelled:
        return Ended.CANCELLED
    try:
        async with asyncio.timeout(until - time.time()):
            await work()
    except TimeoutError:
        return Ended.EXPIRED
    except asyncio.CancelledError:
        if not doing.is_cancelled:
            raise
        return Ended.CANCELLED
    except HttpError as error:
        if error.code == "state_unavailable":
            raise
        return error
    except Exception as error:
        log.exception("%s failed", name)
        return as_http_error(error)
    return Ended.DONE


class Jobs:
    """The jobs of all processes that share a database, as one of them sees and does them."""

    def __init__(self, database: Database, clock: Callable[[], float] = time.time) -> None:
        """`clock`: seconds since 1970."""
        self._records = Records(database, "job", Job, max_bytes=_MAX_BYTES, drops_oldest=False)
        self._clock = clock
        self._me = secrets.token_bytes(12)
        self._works: dict[str, tuple[Work, int]] = {}
        self._doing: dict[Key, Doing] = {}
        self._looking = asyncio.Lock()  # what is done here changes only within
        self._watch: asyncio.Task[None] | None = None

    def register(self, name: str, work: Work, *, most: int) -> None:
        """Has this process do the jobs of this name. `most`: open ones of all processes."""
        self._works[name] = (work, most)

    def start(self) -> None:
        """Goes on with what others have left open, from now on."""
        self._watch = asyncio.get_running_loop().create_task(self._look_on())

    async def stop(self) -> None:
        """Leaves the open jobs to other processes."""
        tasks = [doing.task for doing in self._doing.values() if doing.task is not None]
        if self._watch is not None:
            tasks.append(self._watch)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._watch is not None or tasks:
            with contextlib.suppress(HttpError):
                await self._records.change_all(self._released)

    async def check_room(self, name: str) -> None:
        """Raises HttpError 429 if there are too many jobs of this name already."""
        num, most = sum(job.work == name for _, _, job in await self._records.all()), self._works[name][1]
        if num >= most:
            raise HttpError(429, f"{most} of these are already under way; try again later.", code="queue_full")

    async def add(self, name: str, owner: bytes, id: str) -> None:
        """Begins a job, here unless another process is quicker. Raises HttpError 503."""
        await self._records.put(owner, id, Job(name))
        await self._look()

    async def is_open(self, owner: bytes, id: str) -> bool:
        """Whether the job has not ended."""
        return await self._records.get(owner, id) is not None

    async def cancel(self, owner: bytes, id: str) -> None:
        """Tells the process that does the job; a process elsewhere hears of it within `LOOK_S`."""
        await self._records.change(owner, id, lambda job: replace(job, is_cancelled=True))
        if (doing := self._doing.get((owner, id))) is not None:
            doing.cancel()

    async def ended(self, owner: bytes, id: str) -> None:
        """Returns when the job, if there is one, has ended."""
        while True:
            doing = self._doing.get((owner, id))
            if doing is not None and doing.task is not None:
                await asyncio.wait((doing.task,))
            if not await self.is_open(owner, id):
                return
            await asyncio.sleep(_POLL_S)

    async def _look_on(self) -> None:
        while True:
            with contextlib.suppress(HttpError):  # the database has logged why
                await self._look()
            await asyncio.sleep(LOOK_S)

    async def _look(self) -> None:
        """Takes the jobs that nobody does, renews leases, and hears of cancels."""
        async with self._looking:
            now = self._clock()

            def take(owner: bytes, id: str, job: Job) -> Job:
                is_mine = job.holder == self._me
                left_s = job.until - now
                if job.work not in self._works or (left_s >= LEASE_S * 2 / 3 if is_mine else left_s > 0):
                    return job
                num_deaths = job.num_deaths + (not is_mine and job.holder != b"")
                return replace(job, holder=self._me, until=now + LEASE_S, num_deaths=num_deaths)

            jobs = await self._records.change_all(take)
            mine = {(owner, id): job for owner, id, job in jobs if job.holder == self._me}
            for key, doing in self._doing.items():
                if key not in mine and doing.task is not None:  # it took this process too long to renew the lease
                    doing.task.cancel()
            for key, job in mine.items():
                if key not in self._doing:
                    self._begin(key, job)
                elif job.is_cancelled:
                    self._doing[key].cancel()

    def _begin(self, key: Key, job: Job) -> None:
        doing = self._doing[key] = Doing(job)

        def forget(_: asyncio.Task[None]) -> None:
            if self._doing.get(key) is doing:
                del self._doing[key]

        doing.task = asyncio.get_running_loop().create_task(self._do(key, doing, self._works[job.work][0]))
        doing.task.add_done_callback(forget)

    async def _do(self, key: Key, doing: Doing, work: Work) -> None:
        doing.has_begun = True
        try:
            await work(*key, doing)
        except HttpError as error:
            if error.code == "state_unavailable":
                return  # the next look begins it again
            log.warning("%s has ended: %s", key[1], error)
        except Exception:
            log.exception("%s failed", key[1])
        async with self._looking:
            with contextlib.suppress(HttpError):  # the next look begins it again, and it ends at once
                await self._records.delete(*key)
            del self._doing[key]

    def _released(self, owner: bytes, id: str, job: Job) -> Job:
        return replace(job, holder=b"", until=0.0) if job.holder == self._me else job
