"""The news of one HTTP request's sequences, on their way from the gateway to their one reader.

Owns what waits to be read, what was delivered, and who waits. Who may write to a stream is the gateway alone.
"""

import asyncio
from collections.abc import Callable, Container, Sequence
from itertools import accumulate
from typing import Protocol

import msgspec

from ...ipc.messages import Chunk, Submit, Times
from ..http.exchange import ClientGone
from ..http.http_error import HttpError
from .journal import entries
from .stream_backlog import MAX_BACKLOG_BYTES, StreamBacklog
from .timeline import EndedSequence, Timeline, together


class ShortWay(Protocol):
    """What may take a stream's news past its reader: to wake a task costs more than all else that is done for a token.
    Neither call may raise."""

    def take(self, index: int, chunk: Chunk) -> bool:
        """News of a choice. False: it was not taken, and has to be read."""

    def flush(self) -> None:
        """Comes after all that has come in at once was offered."""


class Keeper(Protocol):
    """Who keeps a stream: the gateway."""

    unflushed: "dict[ShortWay, None]"  # those that took news since all of it was offered

    def end(self, stream: "Stream", error: Exception) -> None:
        """Ends what is open of `stream`."""


class Stream:
    """The news of one HTTP request's sequences. One reader."""

    def __init__(self, gateway: Keeper, first_rid: int, submits: Sequence[Submit], arrived: float) -> None:
        self._gateway = gateway
        self.number = first_rid  # streams in the order in which they came
        self.first_rid = first_rid
        self.arrived = arrived
        self.submits = submits
        self.entries = entries(submits)  # the gateway's: of each choice what was delivered
        self.was_sent = False  # the gateway's: the engine may know of it
        self.was_resumed = False  # the engine has lost it before
        self.num_deaths = 0  # the gateway's: see `PoisonDetector`
        self._patience: asyncio.TimerHandle | None = None  # while it is held and has no answer
        num_choices = len(self.entries)
        self.open_rids = set(range(first_rid, first_rid + num_choices))  # the gateway's: those that have not ended
        self.nums_prompt = [0] * num_choices  # tokens of each choice's prompt, once it was accepted
        self.num_tokens = 0  # of all prompts that were accepted, and of all outputs so far
        self.times: list[Times | None] = [None] * num_choices  # the gateway's: what it knows of each choice's way here
        self.first_news: list[float | None] = [None] * num_choices  # the gateway's: when a choice first got ids
        self.last_news: list[float | None] = [None] * num_choices  # the gateway's: when a choice last got ids
        self.ended: list[EndedSequence] = []  # choices, in the order of their ends
        starts = accumulate((order.n for order in submits), initial=0)
        self._first_of_prompts = set(starts)  # indices: of each prompt its first choice
        self._unanswered = set(self.open_rids)  # of which the engine has said nothing yet
        self._chunks: list[tuple[int, Chunk]] = []
        self._backlog = StreamBacklog()  # what came after them while the reader waits for its client
        self._error: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._short_way: ShortWay | None = None  # only while a reader waits

    @property
    def finished(self) -> bool:
        """Everything has been read and nothing more will come."""
        return not (self.open_rids or self._chunks or self._backlog) and self._error is None

    @property
    def num_unanswered(self) -> int:
        """Open choices of which the engine has said nothing yet."""
        return len(self._unanswered)

    @property
    def longest_output(self) -> int:
        """Tokens of the longest choice that has ended."""
        return max((ended.usage.num_output for ended in self.ended if ended.usage is not None), default=0)

    @property
    def num_output(self) -> int:
        """Tokens of output that were delivered."""
        return sum(len(entry.ids) for entry in self.entries) >> 2

    def timeline(self) -> Timeline:
        """How the time of the whole request passed, once every choice has ended."""
        return together([ended.timeline for ended in self.ended])

    async def admitted(self) -> None:
        """Returns once the engine has taken every sequence. Raises RequestError if it refused one, ClientGone."""
        while self._unanswered and self._error is None:
            await self._wait()
        if self._error is not None:
            raise self._error

    async def chunks(self, short_way: ShortWay | None = None) -> list[tuple[int, Chunk]]:
        """The chunks since the last call, as (choice, chunk) in order; waits for some. Empty after `wake`.

        `short_way` is offered every chunk while this waits. Raises RequestError when the request has failed,
        ClientGone."""
        if not (self._chunks or self._backlog) and self._error is None:
            self._short_way = short_way
            await self._wait()
        if not (self._chunks or self._backlog) and self._error is not None:
            raise self._error
        chunks, self._chunks = self._chunks + self._backlog.take(), []
        return chunks

    def wake(self) -> None:
        """Makes a waiting reader look up."""
        self._short_way = None
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def cancel(self) -> None:
        """The reader leaves. The engine is told of what is still open, once."""
        self.end(ClientGone())

    def end(self, error: Exception) -> None:
        """Cuts it off: the reader gets `error`, and nothing of what it has not read yet."""
        self._chunks.clear()
        self._backlog.clear()
        self._gateway.end(self, error)

    def send(self) -> list[Submit]:
        """For the gateway: the orders for all that is open."""
        if self.was_sent:
            first = self.first_rid
            return [self.entries[rid - first].resumed(rid) for rid in sorted(self.open_rids)]
        self.was_sent = True
        submits, rid = [], self.first_rid
        for order in self.submits:
            submits.append(msgspec.structs.replace(order, rid=rid))
            rid += order.n
        return submits

    def rebase(self, first_rid: int) -> None:
        """For the gateway: its choices get other rids."""
        offset = first_rid - self.first_rid
        self.first_rid = first_rid
        self.was_resumed = True
        self.open_rids = {rid + offset for rid in self.open_rids}
        self._unanswered = {rid + offset for rid in self._unanswered}

    def was_with(self, kinds: Container[str]) -> bool:
        """For the gateway: a process of one of these kinds may have worked on it."""
        if "core" in kinds or "worker" in kinds:
            return True
        return (
            ("tokenizer" in kinds and bool(self._unanswered))
            or ("detokenizer" in kinds and len(self._unanswered) < len(self.open_rids))
            or ("grammar" in kinds and any(order.constraint is not None for order in self.submits))
        )

    def wait_at_most(self, wait_s: float, give_up: Callable[["Stream"], None]) -> None:
        """For the gateway: it is held; if nothing was said of it yet, not for ever."""
        if self._unanswered and self._patience is None:
            self._patience = asyncio.get_running_loop().call_later(wait_s, give_up, self)

    def go_on(self) -> None:
        """For the gateway: it is held no more."""
        if self._patience is not None:
            self._patience.cancel()
            self._patience = None

    def accepted(self, rid: int, num_prompt: int) -> None:
        """For the gateway: the engine has taken this sequence, whose prompt has so many tokens."""
        index = rid - self.first_rid
        if not self.nums_prompt[index]:
            self.nums_prompt[index] = num_prompt
            if index in self._first_of_prompts:
                self.num_tokens += num_prompt
        self.accept(rid)

    def accept(self, rid: int) -> None:
        """For the gateway: the engine has answered for this sequence."""
        if rid in self._unanswered:
            self._unanswered.remove(rid)
            if not self._unanswered:
                self.wake()

    def give(self, index: int, chunk: Chunk) -> None:
        """For the gateway: news of a choice."""
        if self._unanswered:
            self.accept(chunk.rid)
        way = self._short_way
        if way is not None and way.take(index, chunk):
            self._gateway.unflushed[way] = None
        elif self._error is not None:
            pass
        elif self._waiter is not None and not self._backlog:
            self._chunks.append((index, chunk))
            self.wake()
        else:  # the reader is on its way to a client that does not keep up
            self._backlog.add(index, chunk)
            if self._backlog.num_bytes > MAX_BACKLOG_BYTES:
                self.end(HttpError(408, "Too much of the answer was left unread.", code="client_too_slow"))

    def fail(self, error: Exception) -> None:
        """For the gateway: nothing more will come. The first error stands."""
        if self._error is None:
            self._error = error
        self.wake()

    async def _wait(self) -> None:
        assert self._waiter is None, "a stream has one reader"
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None
