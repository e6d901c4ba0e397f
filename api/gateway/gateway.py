"""The door between HTTP and the engine: hands requests out to the tokenizer and leads their news back.

Owns the open requests of this api process, their rids, and the counts behind /metrics. Knows nothing of HTTP or of
OpenAI's shapes. Lives on one event loop; `handle` is called there with whatever the mailbox held.

When a process behind it has died, what is open waits until the engine is whole again, and is then submitted anew with
what was delivered of it (`journal.py`), under other rids: news of the old ones is nobody's.
"""

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence

import msgspec
from msgspec import Struct

from ...errors import RequestError
from ...ipc.messages import (
    RID_BITS,
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
    Reset,
    Restored,
    Snapshot,
    Submit,
    TextBatch,
    TextPrompt,
    Tokenize,
    Tokenized,
    Usage,
)
from ..http.exchange import ClientGone
from ..http.http_error import EngineFailed, HttpError, ShuttingDown
from .drain_rate import DrainRate
from .journal import fingerprint
from .poison_detector import PoisonDetector
from .stats import Stats
from .stream import ShortWay, Stream
from .timeline import EndedSequence, timeline

Question = Tokenize | Detokenize | Describe
Answer = Tokenized | Detokenized | Described
FromEngine = Accepted | TextBatch | Failed | Snapshot | Pulse | Reset | Restored | Answer
"""The messages of `ToApi` that are the gateway's; the others are the api actor's own."""


class Outage(Struct, frozen=True):
    """Processes behind the api are being replaced."""

    lost: tuple[str, ...]  # their names
    reason: str
    since: float  # on the gateway's clock


_KILLED = "The engine has died twice while it worked on this request; it is not tried again."
_OUTAGE = "A part of the engine has died and is being replaced; try again later."


class _Asked:
    """A question on its way."""

    def __init__(self, question: Question, answer: "asyncio.Future[Answer]") -> None:
        self.question = question
        self.answer = answer
        self.num_deaths = 0  # of tokenizers that had it


class Gateway:
    """All open requests of one api process."""

    def __init__(
        self,
        post: Callable[[Submit | Cancel | Question], None],
        *,
        api_index: int = 0,
        outage_wait_s: float = 30.0,
        most_held: int = 10_000,
        most_open: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`post` sends to the tokenizer process; it must neither block nor raise. `outage_wait_s`: how long a request
        without an answer waits for an engine that is not whole. `most_held`: sequences that may wait for it.
        `most_open`: that it can run and let wait; more would be refused there, which costs less here."""
        self._post = post
        self._clock = clock
        self._outage_wait_s = outage_wait_s
        self._most_held = most_held
        self._most_open = most_open
        self._next_rid = api_index << RID_BITS
        self.unflushed: dict[ShortWay, None] = {}  # those that took news since `handle` began, for `Stream`
        self._streams: dict[int, Stream] = {}  # every rid that has not ended
        self._questions: dict[int, _Asked] = {}  # to the tokenizer, not answered yet
        self._held: dict[Stream, None] = {}  # open, and not with the engine now
        self._poison_detector: PoisonDetector[Stream] = PoisonDetector()
        self.outage: Outage | None = None
        self.num_resumed = 0  # sequences that were submitted again
        self._refusal: str | None = None  # why nothing new is taken
        self._idle = asyncio.Event()
        self._idle.set()
        self._drain_rate = DrainRate(clock())
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

    @property
    def retry_after_s(self) -> int:
        """When who is refused now may come again: what is open here, or in the whole engine, will be done by then."""
        core = self.snapshot
        num_ahead = max(len(self._streams), core.num_running + core.num_waiting if core is not None else 0)
        return self._drain_rate.retry_after_s(num_ahead)

    def submit(self, submits: Sequence[Submit]) -> Stream:
        """Sends `submits` on, each with rids of its own (theirs are ignored). The stream's choices are theirs in order.

        Whoever takes the stream must `cancel` it in the end, which is harmless when it has finished. Raises
        ShuttingDown, RequestError."""
        if self._refusal is not None:
            raise ShuttingDown(self._refusal)
        if self._poison_detector.are_known and self._poison_detector.has_killed(fingerprint(submits)):
            raise RequestError("internal", _KILLED)
        num_choices = sum(order.n for order in submits)
        if self._most_open is not None and self._streams and len(self._streams) + num_choices > self._most_open:
            self.stats.errors["queue_full"] += num_choices
            raise RequestError("queue_full", f"{len(self._streams)} sequences are open already; try again later.")
        if self._is_holding and sum(len(held.open_rids) for held in self._held) + num_choices > self._most_held:
            raise RequestError("queue_full", "Too many requests wait for the engine, a part of which is replaced.")
        now = self._clock()
        self._drain_rate.note(now, is_busy=True)
        stream = Stream(self, self._next_rid, submits, now)
        self._next_rid += num_choices
        self._streams.update(dict.fromkeys(stream.open_rids, stream))
        self._idle.clear()
        for order in submits:
            self.stats.asked(order.n, order.limits.max_tokens)
        if self._is_holding:
            self._hold(stream)
        else:
            for order in stream.send():
                self._post(order)
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
                        stream.accepted(rid, num_prompt)
                case Tokenized(rid=rid) | Detokenized(rid=rid) | Described(rid=rid):
                    if (asked := self._questions.get(rid)) is not None and not asked.answer.done():
                        asked.answer.set_result(message)
                case Failed(rid=rid):
                    error = RequestError(
                        message.kind, message.detail, param=message.param, num_tokens=message.num_tokens
                    )
                    if (asked := self._questions.get(rid)) is not None and not asked.answer.done():
                        asked.answer.set_exception(error)
                    if (stream := self._streams.get(rid)) is not None:
                        self._failed(stream, rid, error, now)
                case Snapshot():
                    self.snapshot = message
                case Pulse(name=name):
                    self.pulses[name] = message
                case Reset():
                    self._lose(message, now)
                case Restored():
                    self._restore()
        for way in self.unflushed:
            way.flush()
        self.unflushed.clear()

    def refuse(self, reason: str) -> None:
        """From now on, new requests get 503 with this sentence; open ones go on."""
        self._refusal = reason

    async def drained(self) -> None:
        """Returns when no request is open."""
        await self._idle.wait()

    def close(self, reason: str, *, has_failed: bool = False) -> None:
        """Ends every open stream with an error that says `reason`, and refuses new ones. `has_failed`: the engine has,
        and what is open may be why."""
        self.refuse(reason)
        error = EngineFailed(reason) if has_failed else ShuttingDown(reason)
        for stream in dict.fromkeys(self._streams.values()):
            self.end(stream, error)
        for asked in self._questions.values():
            if not asked.answer.done():
                asked.answer.set_exception(error)

    def end(self, stream: Stream, error: Exception) -> None:
        """Ends what is open of `stream`: the engine is told once, the reader gets `error`."""
        rids = tuple(sorted(stream.open_rids))
        if rids:
            reason = _abort_reason(error)
            now = self._clock()
            for rid in rids:
                self._close_rid(stream, rid, f"abort:{reason}", now)
            self.stats.finished["abort"] += len(rids)
            self.stats.aborts[reason] += len(rids)
            if stream in self._held:
                del self._held[stream]
                stream.go_on()
            else:
                self._post(Cancel(rids))
        stream.fail(error)

    # ── a process behind this one has died ───────────────────────────────────────────────────────────────────────────

    @property
    def _is_holding(self) -> bool:
        """Nothing new is sent on: the engine is not whole, or works on what may have killed it."""
        return self.outage is not None or bool(self._poison_detector)

    def _hold(self, stream: Stream) -> None:
        """It waits for the engine: as long as it takes if its client has heard something, else for a while."""
        self._held[stream] = None
        stream.wait_at_most(self._outage_wait_s, self._give_up)

    def _give_up(self, stream: Stream) -> None:
        if stream in self._held:
            self.end(stream, RequestError("unavailable", _OUTAGE))

    def _lose(self, reset: Reset, now: float) -> None:
        """What is open is not with the engine any more."""
        since = now if self.outage is None else self.outage.since
        lost = reset.lost if self.outage is None else tuple(dict.fromkeys((*self.outage.lost, *reset.lost)))
        self.outage = Outage(lost, reset.reason, since)
        kinds = {name.partition("-")[0] for name in reset.lost}
        self.stats.lost.update(name.partition("-")[0] for name in reset.lost)
        streams = list(dict.fromkeys(self._streams.values()))
        killer = self._poison_detector.blame(s for s in streams if s not in self._held and s.was_with(kinds))
        if killer is not None:
            self._poison_detector.remember(fingerprint(killer.submits))
            self._failed(killer, min(killer.open_rids), RequestError("internal", _KILLED), now)
        for stream in streams:
            if stream.open_rids:
                self._hold(stream)
        if "tokenizer" in kinds:
            for asked in self._questions.values():
                asked.num_deaths += 1
                if asked.num_deaths > 1 and not asked.answer.done():
                    asked.answer.set_exception(RequestError("internal", _KILLED))

    def _restore(self) -> None:
        """The engine is whole. Who may have killed it goes first, and a few at a time; then all others."""
        if self.outage is None:
            return
        self.outage = None
        self._held = dict.fromkeys(sorted(self._held, key=lambda stream: stream.number))
        self._poison_detector.line_up(stream for stream in self._held if stream.num_deaths)
        for asked in self._questions.values():
            if not asked.answer.done():
                self._post(asked.question)
        self._take_turns()

    def _take_turns(self) -> None:
        while self.outage is None and not self._poison_detector:
            turn = self._poison_detector.next()
            for stream in turn or list(self._held):
                if stream.open_rids:
                    self._resume(stream)
                else:
                    self._poison_detector.got_on(stream, 0)
            if not turn:
                return

    def _resume(self, stream: Stream) -> None:
        """Submits what is open of it: again and under new rids, if the engine had it before."""
        del self._held[stream]
        stream.go_on()
        if stream.was_sent:
            for rid in stream.open_rids:
                del self._streams[rid]
            stream.rebase(self._next_rid)
            self._next_rid += len(stream.entries)
            self._streams.update(dict.fromkeys(stream.open_rids, stream))
            self.num_resumed += len(stream.open_rids)
        for order in stream.send():
            self._post(order)

    def _failed(self, stream: Stream, rid: int, error: RequestError, now: float) -> None:
        """The engine has failed one of its sequences: that ends it."""
        self.stats.finished["error"] += 1
        self.stats.errors[error.kind] += 1
        self._close_rid(stream, rid, f"error:{error.kind}", now)
        self.end(stream, error)

    def _take(self, stream: Stream, chunk: Chunk, now: float) -> None:
        stats = self.stats
        index = chunk.rid - stream.first_rid
        if chunk.times is not None and stream.times[index] is None:  # what is resumed began when it first began
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
        stream.entries[index].note(chunk)
        if self._poison_detector:
            self._poison_detector.got_on(stream, len(chunk.ids) >> 2)
            self._take_turns()
        if chunk.finish is None:
            stream.give(index, chunk)
            return
        finish: str = chunk.finish
        times, usage = stream.times[index], chunk.usage
        if stream.was_resumed and times is not None and usage is not None:
            chunk = msgspec.structs.replace(chunk, usage=Usage(usage.num_prompt, usage.num_output, times.num_cached))
        self._close_rid(stream, chunk.rid, finish, now, chunk.usage)
        stats.finished[finish] += 1
        if finish == "abort":  # not by us, or the rid would be closed: an answer that was cut is no success
            stats.aborts["unavailable"] += 1
            self.end(stream, RequestError("unavailable", "The request was cancelled by the server."))
        else:
            stream.give(index, chunk)

    def _close_rid(self, stream: Stream, rid: int, outcome: str, now: float, usage: Usage | None = None) -> None:
        index = rid - stream.first_rid
        passed = timeline(stream.arrived, stream.times[index], stream.first_news[index], now)
        stream.ended.append(EndedSequence(index, outcome, passed, usage))
        if usage is not None and outcome != "abort":
            self.stats.completed(passed, usage)
        stream.open_rids.discard(rid)
        if self._poison_detector and not stream.open_rids:
            self._poison_detector.got_on(stream, 0)
            self._take_turns()
        if not stream.open_rids and (longest := stream.longest_output):
            self.stats.max_generation_tokens.observe(longest)
        stream.accept(rid)
        del self._streams[rid]
        self._drain_rate.note(now, is_busy=bool(self._streams), num_ended=usage is not None)
        self._note_idle()

    async def _ask(self, question: Question) -> Answer:
        if self._refusal is not None:
            raise ShuttingDown(self._refusal)
        self._next_rid += 1
        answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._questions[question.rid] = _Asked(question, answer)
        self._idle.clear()
        if self.outage is None:
            self._post(question)
        try:
            async with asyncio.timeout(None if self.outage is None else self._outage_wait_s):
                return await answer
        except TimeoutError:
            raise RequestError("unavailable", _OUTAGE) from None
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
