"""The door between HTTP and the engine: hands requests out to the tokenizer and leads their news back.

Owns the open requests of this api process, their rids, and the counts behind /metrics. Knows nothing of HTTP or of
OpenAI's shapes. Lives on one event loop; `handle` is called there with whatever the mailbox held.
"""

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import msgspec

from ..errors import RequestError
from ..ipc.messages import (
    Accepted,
    Cancel,
    ChatPrompt,
    Chunk,
    Describe,
    Described,
    Detokenize,
    Detokenized,
    Failed,
    Pulse,
    Snapshot,
    Submit,
    TextBatch,
    TextPrompt,
    Times,
    Tokenize,
    Tokenized,
    Usage,
)
from .http_error import HttpError, ShuttingDown
from .stats import Stats
from .timeline import EndedSequence, Timeline, timeline, together

Question = Tokenize | Detokenize | Describe
Answer = Tokenized | Detokenized | Described
FromEngine = Accepted | TextBatch | Failed | Snapshot | Pulse | Answer
"""The messages of `ToApi` that are the gateway's; the others are the api actor's own."""

RID_BITS = 40  # of a rid: the counter; above it the api process's index


class ClientGone(Exception):
    """The client has left; there is nobody to tell."""


class ShortWay(Protocol):
    """What may take a stream's news past its reader: to wake a task costs more than all else that is done for a token.
    Neither call may raise."""

    def take(self, index: int, chunk: Chunk) -> bool:
        """News of a choice. False: it was not taken, and has to be read."""

    def flush(self) -> None:
        """Comes after all that has come in at once was offered."""


class Gateway:
    """All open requests of one api process."""

    def __init__(
        self,
        post: Callable[[Submit | Cancel | Question], None],
        *,
        api_index: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`post` sends to the tokenizer process; it must neither block nor raise."""
        self._post = post
        self._clock = clock
        self._next_rid = api_index << RID_BITS
        self.unflushed: dict[ShortWay, None] = {}  # those that took news since `handle` began, for `Stream`
        self._streams: dict[int, Stream] = {}  # every rid that has not ended
        self._questions: dict[int, asyncio.Future[Answer]] = {}  # to the tokenizer, not answered yet
        self._refusal: str | None = None  # why nothing new is taken
        self._idle = asyncio.Event()
        self._idle.set()
        self.snapshot: Snapshot | None = None  # the core's last word
        self.pulses: dict[str, Pulse] = {}  # the last one of each process
        self.stats = Stats()

    @property
    def num_open(self) -> int:
        """Sequences that have not ended."""
        return len(self._streams)

    @property
    def num_requests(self) -> int:
        """Requests for sequences that have not ended."""
        return len(set(self._streams.values()))

    @property
    def num_unanswered(self) -> int:
        """Sequences of which the engine has said nothing yet: they are with the tokenizer."""
        return sum(stream.num_unanswered for stream in set(self._streams.values()))

    @property
    def refusal(self) -> str | None:
        """Why new requests are refused, if they are."""
        return self._refusal

    def submit(self, orders: Sequence[Submit]) -> "Stream":
        """Sends `orders` on, each with rids of its own (theirs are ignored). The stream's choices are theirs in order.

        Whoever takes the stream must `cancel` it in the end, which is harmless when it has finished. Raises
        ShuttingDown."""
        if self._refusal is not None:
            raise ShuttingDown(self._refusal)
        first = self._next_rid
        stream = Stream(self, first, sum(order.n for order in orders), self._clock())
        self._streams.update(dict.fromkeys(stream.open_rids, stream))
        self._idle.clear()
        for order in orders:
            stream.first_rids.add(self._next_rid)
            self._post(msgspec.structs.replace(order, rid=self._next_rid))
            self._next_rid += order.n
            self.stats.asked(order.n, order.limits.max_tokens)
        return stream

    async def tokenize(self, prompt: TextPrompt | ChatPrompt, *, pieces: bool = False) -> Tokenized:
        """The ids of a prompt; with `pieces` the text of each, too. Raises RequestError."""
        answer = await self._ask(Tokenize(self._next_rid, prompt, pieces))
        assert isinstance(answer, Tokenized), answer
        return answer

    async def detokenize(self, ids: bytes, *, skip_special_tokens: bool = False) -> str:
        """The text of ids that the vocabulary has. Raises RequestError."""
        answer = await self._ask(Detokenize(self._next_rid, ids, skip_special_tokens))
        assert isinstance(answer, Detokenized), answer
        return answer.text

    async def describe_tokenizer(self) -> Described:
        """Its special tokens and its chat template. Raises RequestError."""
        answer = await self._ask(Describe(self._next_rid))
        assert isinstance(answer, Described), answer
        return answer

    def handle(self, messages: Iterable[FromEngine]) -> None:
        """Takes everything that came in since the last time. News of requests that have ended here is dropped."""
        now = self._clock()
        for message in messages:
            match message:
                case TextBatch(chunks=chunks):
                    for chunk in chunks:
                        if (stream := self._streams.get(chunk.rid)) is not None:
                            self._take(stream, chunk, now)
                case Accepted(rid=rid, num_prompt=num_prompt):
                    if (stream := self._streams.get(rid)) is not None:
                        stream.nums_prompt[rid - stream.first_rid] = num_prompt
                        if rid in stream.first_rids:
                            stream.num_tokens += num_prompt
                        stream.accept(rid)
                case Tokenized(rid=rid) | Detokenized(rid=rid) | Described(rid=rid):
                    if (question := self._questions.get(rid)) is not None and not question.done():
                        question.set_result(message)
                case Failed(rid=rid, kind=kind, detail=detail):
                    if (question := self._questions.get(rid)) is not None and not question.done():
                        question.set_exception(RequestError(kind, detail))
                    if (stream := self._streams.get(rid)) is not None:
                        self.stats.finished["error"] += 1
                        self.stats.errors[kind] += 1
                        self._close_rid(stream, rid, f"error:{kind}", now)
                        self.end(stream, RequestError(kind, detail))
                case Snapshot():
                    self.snapshot = message
                case Pulse(name=name):
                    self.pulses[name] = message
        for way in self.unflushed:
            way.flush()
        self.unflushed.clear()

    def refuse(self, reason: str) -> None:
        """From now on, new requests get 503 with this sentence; open ones go on."""
        self._refusal = reason

    async def drained(self) -> None:
        """Returns when no request is open."""
        await self._idle.wait()

    def close(self, reason: str) -> None:
        """Ends every open stream with an error that says `reason`, and refuses new ones."""
        self.refuse(reason)
        for stream in dict.fromkeys(self._streams.values()):
            self.end(stream, ShuttingDown(reason))
        for question in self._questions.values():
            if not question.done():
                question.set_exception(ShuttingDown(reason))

    def end(self, stream: "Stream", error: Exception) -> None:
        """Ends what is open of `stream`: the engine is told once, the reader gets `error`."""
        rids = tuple(sorted(stream.open_rids))
        if rids:
            reason = _abort_reason(error)
            now = self._clock()
            for rid in rids:
                self._close_rid(stream, rid, f"abort:{reason}", now)
            self.stats.finished["abort"] += len(rids)
            self.stats.aborts[reason] += len(rids)
            self._post(Cancel(rids))
        stream.fail(error)

    def _take(self, stream: "Stream", chunk: Chunk, now: float) -> None:
        stats = self.stats
        index = chunk.rid - stream.first_rid
        if chunk.times is not None:
            stream.times[index] = chunk.times
        if chunk.ids:
            before = stream.last_news[index]
            if before is None:
                stats.time_to_first_token_s.observe(now - stream.arrived)
                stream.first_news[index] = now
            else:
                stats.inter_token_latency_s.observe(now - before)
            stream.last_news[index] = now
            stream.num_tokens += len(chunk.ids) >> 2
        if chunk.finish is None:
            stream.give(index, chunk)
            return
        self._close_rid(stream, chunk.rid, chunk.finish, now, chunk.usage)
        stats.finished[chunk.finish] += 1
        if chunk.finish == "abort":  # not by us, or the rid would be closed: an answer that was cut is no success
            stats.aborts["unavailable"] += 1
            self.end(stream, RequestError("unavailable", "The request was cancelled by the server."))
        else:
            stream.give(index, chunk)

    def _close_rid(self, stream: "Stream", rid: int, outcome: str, now: float, usage: Usage | None = None) -> None:
        index = rid - stream.first_rid
        passed = timeline(stream.arrived, stream.times[index], stream.first_news[index], now)
        stream.ended.append(EndedSequence(index, outcome, passed, usage))
        if usage is not None and outcome != "abort":
            self.stats.completed(passed, usage)
        stream.open_rids.discard(rid)
        if not stream.open_rids and (longest := stream.longest_output):
            self.stats.max_generation_tokens.observe(longest)
        stream.accept(rid)
        del self._streams[rid]
        self._note_idle()

    async def _ask(self, question: Question) -> Answer:
        if self._refusal is not None:
            raise ShuttingDown(self._refusal)
        self._next_rid += 1
        answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._questions[question.rid] = answer
        self._idle.clear()
        self._post(question)
        try:
            return await answer
        finally:
            del self._questions[question.rid]
            self._note_idle()

    def _note_idle(self) -> None:
        if not self._streams and not self._questions:
            self._idle.set()


def _abort_reason(error: Exception) -> str:
    """What /metrics says why a sequence was cut short."""
    match error:
        case ClientGone():
            return "client_gone"
        case ShuttingDown():
            return "shutting_down"
        case RequestError():
            return error.kind
        case HttpError(code=str(code)):
            return code
        case _:
            return "internal"


class Stream:
    """The news of one HTTP request's sequences. One reader."""

    def __init__(self, gateway: Gateway, first_rid: int, num_choices: int, arrived: float) -> None:
        self._gateway = gateway
        self.first_rid = first_rid
        self.arrived = arrived
        self.open_rids = set(range(first_rid, first_rid + num_choices))  # the gateway's: those that have not ended
        self.first_rids: set[int] = set()  # the gateway's: of each prompt the rid of its first choice
        self.nums_prompt = [0] * num_choices  # tokens of each choice's prompt, once it was accepted
        self.num_tokens = 0  # of all prompts that were accepted, and of all outputs so far
        self.times: list[Times | None] = [None] * num_choices  # the gateway's: what it knows of each choice's way here
        self.first_news: list[float | None] = [None] * num_choices  # the gateway's: when a choice first got ids
        self.last_news: list[float | None] = [None] * num_choices  # the gateway's: when a choice last got ids
        self.ended: list[EndedSequence] = []  # choices, in the order of their ends
        self._unanswered = set(self.open_rids)  # of which the engine has said nothing yet
        self._news: list[tuple[int, Chunk]] = []
        self._error: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._short_way: ShortWay | None = None  # only while a reader waits

    @property
    def finished(self) -> bool:
        """Everything has been read and nothing more will come."""
        return not self.open_rids and not self._news and self._error is None

    @property
    def num_unanswered(self) -> int:
        """Open choices of which the engine has said nothing yet."""
        return len(self._unanswered)

    @property
    def longest_output(self) -> int:
        """Tokens of the longest choice that has ended."""
        return max((ended.usage.num_output for ended in self.ended if ended.usage is not None), default=0)

    def timeline(self) -> Timeline:
        """How the time of the whole request passed, once every choice has ended."""
        return together([ended.timeline for ended in self.ended])

    async def admitted(self) -> None:
        """Returns once the engine has taken every sequence. Raises RequestError if it refused one, ClientGone."""
        while self._unanswered and self._error is None:
            await self._wait()
        if self._error is not None:
            raise self._error

    async def news(self, short_way: ShortWay | None = None) -> list[tuple[int, Chunk]]:
        """The chunks since the last call, as (choice, chunk) in order; waits for some. Empty after `wake`.

        `short_way` is offered every chunk while this waits. Raises RequestError when the request has failed,
        ClientGone."""
        if not self._news and self._error is None:
            self._short_way = short_way
            await self._wait()
        if not self._news and self._error is not None:
            raise self._error
        news, self._news = self._news, []
        return news

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
        self._news.clear()
        self._gateway.end(self, error)

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
        elif self._error is None:
            self._news.append((index, chunk))
            self.wake()

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
