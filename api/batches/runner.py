"""Answers batches, a few requests at a time, through the same endpoints that clients use.

A batch is a job (`api/state/jobs.py`). Each answer is kept at once under the number of its line, so that whoever goes
on with the batch answers only what is left.
"""

import asyncio
import hashlib
import logging
import time
from collections.abc import AsyncIterator
from functools import partial

import msgspec

from ..http.http_error import HttpError
from ..output.inner_call import InnerCalls
from ..state.jobs import Doing, Ended, Jobs, end_of
from .format import BatchRequest, answer_line, read_request
from .store import BatchStore, FileWriter
from .types import BatchBody, BatchError, BatchErrors, RequestCounts

MAX_REQUESTS = 50_000
MAX_OPEN = 1000  # batches
WINDOW_S = 24 * 3600
_MAX_COMPLAINTS = 100
_LINES_A_TURN = 256  # lines that are read before other tasks of the loop run
_JOB = "batch"
_OPEN = ("validating", "in_progress", "finalizing", "cancelling")

log = logging.getLogger(__name__)


class InvalidFileError(HttpError):
    """The batch's file cannot be answered."""

    def __init__(self, problems: list[BatchError]) -> None:
        super().__init__(400, "The batch's file is not valid.")
        self.problems = problems


class BatchRunner:
    def __init__(self, store: BatchStore, jobs: Jobs, calls: InnerCalls, *, max_bytes: int) -> None:
        """`max_bytes`: of a request's line."""
        self._store = store
        self._jobs = jobs
        self._calls = calls
        self._max_bytes = max_bytes
        jobs.register(_JOB, self._run, most=MAX_OPEN)

    async def begin(self, owner: bytes, batch: BatchBody) -> None:
        """Keeps a new batch and answers it in the background. Raises HttpError 429 if there are too many."""
        await self._jobs.check_room(_JOB)
        await self._store.put(owner, batch)
        await self._jobs.add(_JOB, owner, batch.id)

    async def cancel(self, owner: bytes, id: str) -> BatchBody:
        """Cancels a batch; its answers so far are kept. Raises HttpError 404, or 409 if it has ended."""
        batch = await self._store.batch(owner, id)
        if batch.status not in _OPEN:
            raise HttpError(409, f"The batch is {batch.status} and cannot be cancelled.")
        if batch.status in ("validating", "in_progress"):
            fields = {"status": "cancelling", "cancelling_at": int(time.time())}
            batch = await self._store.change(owner, id, of=("validating", "in_progress"), **fields)
            if batch.status == "cancelling":
                await self._jobs.cancel(owner, id)
        return batch

    async def reads(self, owner: bytes, file_id: str) -> bool:
        """Whether an open batch needs this file."""
        batches = await self._store.batches_of(owner)
        return any(batch.input_file_id == file_id and batch.status in _OPEN for batch in batches)

    # ── the work ─────────────────────────────────────────────────────────────────────────────────────────────────────

    async def _run(self, owner: bytes, id: str, doing: Doing) -> None:
        batch = await self._store.batch(owner, id)
        if batch.status not in _OPEN:
            await self._store.drop_answers(owner, id)
            return
        match await end_of(partial(self._go_on, owner, batch), doing, until=batch.expires_at, name="batch"):
            case InvalidFileError() as error:
                await self._fail(owner, id, error.problems)
            case HttpError() as error:
                await self._fail(owner, id, [BatchError(str(error), code=error.code or "server_error")])
            case ended:
                await self._finish(owner, id, ended is Ended.EXPIRED)

    async def _go_on(self, owner: bytes, batch: BatchBody) -> None:
        """Does what the batch's status says is left. Raises InvalidFileError."""
        if batch.status == "validating":
            counts, wrong = await self._validate(owner, batch)
            if wrong:
                raise InvalidFileError(wrong)
            fields = {"status": "in_progress", "in_progress_at": int(time.time()), "request_counts": counts}
            batch = await self._store.change(owner, batch.id, of=("validating",), **fields)
        if batch.status == "in_progress":
            await self._answer_all(owner, batch)

    async def _validate(self, owner: bytes, batch: BatchBody) -> tuple[RequestCounts, list[BatchError]]:
        """Checks the whole file before any request is sent. Returns what is wrong with it, too."""
        wrong: list[BatchError] = []
        ids: set[str] = set()
        async for number, line in self._store.lines(owner, batch.input_file_id):
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
            if number % _LINES_A_TURN == 0:
                await asyncio.sleep(0)
        if not ids and not wrong:
            wrong.append(BatchError("The file has no requests."))
        return RequestCounts(len(ids)), wrong

    async def _answer_all(self, owner: bytes, batch: BatchBody) -> None:
        done: set[int] = set()
        num_failed = 0
        async for number, kind, _ in self._store.answers(owner, batch.id):
            done.add(number)
            num_failed += kind == "error"
        counts = RequestCounts(batch.request_counts.total, len(done) - num_failed, num_failed)

        async def left() -> AsyncIterator[tuple[int, BatchRequest]]:
            async for number, line in self._store.lines(owner, batch.input_file_id):
                if number not in done:
                    yield number, read_request(line)

        async def answer(numbered: tuple[int, BatchRequest]) -> None:
            nonlocal counts
            number, request = numbered
            status, id, body = await self._calls.post(request.url, msgspec.json.encode(request.body), owner=owner)
            is_good = status == 200
            line = answer_line(request.custom_id, status, id, body)
            await self._store.put_answer(owner, batch.id, number, "output" if is_good else "error", line)
            counts = RequestCounts(counts.total, counts.completed + is_good, counts.failed + (not is_good))
            await self._store.change(owner, batch.id, of=_OPEN, request_counts=counts)

        await self._store.change(owner, batch.id, of=_OPEN, request_counts=counts)
        await self._calls.for_each(left(), answer)

    async def _finish(self, owner: bytes, id: str, has_expired: bool) -> None:
        """Makes the answers files. May be done again from the beginning, with the same outcome."""
        now = int(time.time())
        batch = await self._store.batch(owner, id)
        if batch.status != "finalizing":
            now = max(now, batch.expires_at) if has_expired else now
            batch = await self._store.change(owner, id, of=_OPEN, status="finalizing", finalizing_at=now)
        assert batch.finalizing_at is not None, f"{id} is {batch.status}"
        writers: dict[str, FileWriter] = {}
        async for _, kind, line in self._store.answers(owner, id):
            if kind not in writers:
                file_id = f"file-{hashlib.sha256(f'{id} {kind}'.encode()).hexdigest()[:24]}"
                writers[kind] = await self._store.write_file(owner, f"{id}_{kind}.jsonl", "batch_output", file_id)
            await writers[kind].write(line)
        files = {f"{kind}_file_id": (await writer.complete()).id for kind, writer in writers.items()}
        has_expired = batch.finalizing_at >= batch.expires_at
        status = "cancelled" if batch.cancelling_at is not None else "expired" if has_expired else "completed"
        fields: dict[str, object] = {"status": status, f"{status}_at": int(time.time()), **files}
        await self._store.change(owner, id, of=_OPEN, **fields)
        await self._store.drop_answers(owner, id)

    async def _fail(self, owner: bytes, id: str, errors: list[BatchError]) -> None:
        fields = {"status": "failed", "failed_at": int(time.time()), "errors": BatchErrors(errors)}
        await self._store.change(owner, id, of=_OPEN, **fields)
        await self._store.drop_answers(owner, id)
