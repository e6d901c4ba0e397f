"""Answers the batches of one api process, a few requests at a time, through the same endpoints that clients use.

Each answer is appended to a file of the batch at once, so a restarted server continues where the last one ended.
"""

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
from starlette.types import ASGIApp

from ..http.http_error import HttpError
from ..output.inner_call import call_endpoint
from .format import BatchRequest, answer_line, read_request
from .store import BatchStore
from .types import BatchBody, BatchError, BatchErrors, RequestCounts

MAX_REQUESTS = 50_000
WINDOW_S = 24 * 3600
_MAX_COMPLAINTS = 100
_LINES_A_TURN = 256  # lines that are read before other tasks of the loop run
_PAUSE_S = 1.0  # before a request is sent again after 429 or 503
_OPEN = ("validating", "in_progress", "finalizing", "cancelling")

log = logging.getLogger(__name__)


class _Answered(msgspec.Struct, frozen=True):
    custom_id: str


class BatchRunner:
    """Runs one task per batch."""

    def __init__(self, store: BatchStore, app: ASGIApp, *, concurrency: int, max_bytes: int) -> None:
        """`app`: the endpoints, without checks of keys and rates. `concurrency`: limit of requests in flight, over all
        batches. `max_bytes`: of a request's line."""
        self._store = store
        self._app = app
        self._slots = asyncio.Semaphore(concurrency)
        self._concurrency = concurrency
        self._max_bytes = max_bytes
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def __contains__(self, id: str) -> bool:
        """Whether the batch is still being answered."""
        return id in self._tasks

    def resume(self) -> None:
        """Continues the batches that an earlier server has left open."""
        for id, stored in self._store.batches.items():
            if stored.body.status in _OPEN:
                self.start(stored.owner, id)

    def start(self, owner: str, id: str) -> None:
        """Answers a batch in the background."""
        self._tasks[id] = asyncio.get_running_loop().create_task(self._run(owner, id))

    def cancel(self, id: str) -> BatchBody:
        """Cancels a batch; its answers so far are kept. Raises HttpError 409 if it has ended."""
        batch = self._store.batches[id].body
        if batch.status not in _OPEN:
            raise HttpError(409, f"The batch is {batch.status} and cannot be cancelled.")
        if batch.status != "cancelling":
            batch = self._store.change(id, status="cancelling", cancelling_at=int(time.time()))
            self._tasks[id].cancel()
        return batch

    async def stop(self) -> None:
        """Stops without finishing, so that the next server continues."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _run(self, owner: str, id: str) -> None:
        batch = self._store.batches[id].body
        try:
            async with asyncio.timeout(batch.expires_at - time.time()):
                if batch.status == "validating":
                    if not await self._validate(batch):
                        return
                    batch = self._store.change(id, status="in_progress", in_progress_at=int(time.time()))
                if batch.status != "cancelling":
                    await self._answer_all(owner, batch)
            now = int(time.time())
            self._finish(owner, id, "cancelled" if batch.status == "cancelling" else "completed", now)
        except TimeoutError:
            self._finish(owner, id, "expired", int(time.time()))
        except asyncio.CancelledError:
            if self._store.batches[id].body.status == "cancelling":
                self._finish(owner, id, "cancelled", int(time.time()))
            raise
        except Exception:
            log.exception("batch %s failed", id)
            errors = BatchErrors([BatchError("The server failed on this batch.", code="server_error")])
            self._store.change(id, status="failed", failed_at=int(time.time()), errors=errors)
        finally:
            self._tasks.pop(id, None)

    async def _validate(self, batch: BatchBody) -> bool:
        """Checks the whole file before any request is sent. Returns whether it is valid."""
        wrong: list[BatchError] = []
        ids: set[str] = set()
        async for number, line in _lines(self._store.content(batch.input_file_id)):
            try:
                if len(line) > self._max_bytes:
                    raise ValueError(f"a request has at most {self._max_bytes} bytes.")
                request = read_request(line)
                if request.url != batch.endpoint:
                    raise ValueError(f"the batch is for {batch.endpoint}, this is for {request.url}.")
                if request.custom_id in ids:
                    raise ValueError(f"custom_id {request.custom_id[:100]!r} appears twice.")
                if len(ids) == MAX_REQUESTS:
                    raise ValueError(f"a batch has at most {MAX_REQUESTS} requests.")
                ids.add(request.custom_id)
            except ValueError as error:
                wrong.append(BatchError(f"Line {number}: {error}", number))
                if len(wrong) == _MAX_COMPLAINTS:
                    break
        if not ids and not wrong:
            wrong.append(BatchError("The file has no requests."))
        if wrong:
            self._store.change(batch.id, status="failed", failed_at=int(time.time()), errors=BatchErrors(wrong))
        else:
            self._store.change(batch.id, request_counts=RequestCounts(len(ids)))
        return not wrong

    async def _answer_all(self, owner: str, batch: BatchBody) -> None:
        well, badly = _mend(self._path(batch.id, "output")), _mend(self._path(batch.id, "error"))
        done = well | badly
        counts = RequestCounts(batch.request_counts.total, len(well), len(badly))
        self._store.change(batch.id, request_counts=counts)
        async with asyncio.TaskGroup() as group:
            # A task is created when another ends, so that a long file is never in memory as a whole.
            ahead = asyncio.Semaphore(self._concurrency)
            async for _, line in _lines(self._store.content(batch.input_file_id)):
                request = read_request(line)
                if request.custom_id not in done:
                    await ahead.acquire()
                    task = group.create_task(self._answer(owner, batch.id, request))
                    task.add_done_callback(lambda _: ahead.release())

    async def _answer(self, owner: str, id: str, request: BatchRequest) -> None:
        body = msgspec.json.encode(request.body)
        request_id = secrets.token_hex(12)
        async with self._slots:
            while True:
                status, answer = await call_endpoint(
                    self._app, request.url, body, owner=bytes.fromhex(owner), request_id=request_id
                )
                if status not in (429, 503):
                    break
                await asyncio.sleep(_PAUSE_S)
        with self._path(id, "output" if status == 200 else "error").open("ab") as file:
            file.write(answer_line(request.custom_id, status, request_id, answer))
        counts = self._store.batches[id].body.request_counts
        counts = RequestCounts(counts.total, counts.completed + (status == 200), counts.failed + (status != 200))
        self._store.change(id, request_counts=counts)

    def _path(self, id: str, kind: str) -> Path:
        return self._store.folder / f"{id}.{kind}"

    def _finish(self, owner: str, id: str, status: str, now: int) -> None:
        self._store.change(id, status="finalizing", finalizing_at=now)
        fields: dict[str, object] = {"status": status, f"{status}_at": now}
        for kind in ("output", "error"):
            path = self._path(id, kind)
            if path.exists():
                file_id = self._store.new_id()
                path.replace(self._store.content(file_id))
                self._store.keep(owner, file_id, f"{id}_{kind}.jsonl", "batch_output")
                fields[f"{kind}_file_id"] = file_id
        self._store.change(id, **fields)


async def _lines(path: Path) -> AsyncIterator[tuple[int, bytes]]:
    """(number, line) of the lines that are not blank."""
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if number % _LINES_A_TURN == 0:
                await asyncio.sleep(0)
            if line.strip():
                yield number, line


def _mend(path: Path) -> set[str]:
    """The custom_ids that have an answer. Truncates an incomplete last line."""
    ids: set[str] = set()
    if not path.exists():
        return ids
    with path.open("r+b") as file:
        whole = 0
        for line in file:
            if not line.endswith(b"\n"):
                file.truncate(whole)
                break
            whole += len(line)
            ids.add(msgspec.json.decode(line, type=_Answered).custom_id)
    return ids
