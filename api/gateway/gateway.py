"""Between HTTP and the engines: sends requests to a tokenizer, and puts what comes back into their buffers.

Owns the open requests of this api process, their rids, and the counts behind /metrics. Knows nothing of HTTP or of
OpenAI's shapes. Lives on one event loop; `handle` is called there with everything that the mailbox held.

When a process of an engine has died, its open requests are submitted again, with the output that was delivered
(`journal.py`) and under new rids, so that chunks of the old rids are dropped: to another engine if there is one that
takes requests, else when an engine is whole again. Requests that were with two processes when they died stay with their
engine, so that they cannot kill one after the other.
"""

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypedDict

from msgspec.structs import replace

from ...config.latency_classes import LatencyClass
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
from ..engines.choice import Choice
from ..http.exchange import ClientGone
from ..http.http_error import EngineFailed, HttpError, ShuttingDown
from .drain_rate import DrainRate
from .engine import Engine, Outage, Post, Question, beginning
from .journal import fingerprint
from .open_request import OpenRequest, OpenSequence
from .output_buffer import Consumer, OutputBuffer
from .stats import Stats
from .stream import Stream
from .timeline import EndedSequence, timeline


class Bounds(TypedDict):
    """Arguments of a gateway that may change while it serves."""

    outage_wait_s: float
    max_held: int
    max_open: int
    latency_classes: Mapping[str, LatencyClass]


Answer = Tokenized | Detokenized | Described
FromEngine = Accepted | TextBatch | Failed | Snapshot | Pulse | Reset | Restored | Answer
"""The messages of `ToApi` that the gateway handles; the api actor handles the others."""


_KILLED = "The engine has died twice while it worked on this request; it is not tried again."
_SUSPECT = "The request was in two deaths of processes, so only its engine may try it again, and that one is lost."
_OUTAGE = "A part of the engine has died and is being replaced; try again later."


class _Asked:
    """A question to a tokenizer that has no answer yet."""

    def __init__(self, question: Question, answer: "asyncio.Future[Answer]") -> None:
        self.engine: Engine | None = None  # that was asked; None: none was, or it has died
        self.question = question
        self.answer = answer
        self.num_deaths = 0  # of tokenizer processes that had it


class Gateway:
    """All open requests of one api process."""

    def __init__(
        self,
        *posts: Post,
        api_index: int = 0,
        outage_wait_s: float = 30.0,
        max_held: int = 10_000,
        max_open: int | None = None,
        has_siblings: bool = False,
        on_use: Callable[[bool], None] = lambda _: None,
        latency_classes: Mapping[str, LatencyClass] = {},
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`posts`: for each engine what sends to its tokenizer; it must neither block nor raise. `outage_wait_s`: how
        long a request that was not admitted waits for an engine that is whole. `max_held`: sequences that may wait for
        one. `max_open`: sequences that the cores can run and queue; they would refuse more, and refusing here costs
        less. `has_siblings`: other api processes send to the engines as well. `on_use` is called with whether something
        is open, when that changes. `latency_classes`: whose targets are compared with what requests get."""
        self._clock = clock
        self._outage_wait_s = outage_wait_s
        self._max_held = max_held
        self._max_open = max_open
        self._has_siblings = has_siblings
        self._on_use = on_use
        self._hindrance: str | None = None  # why requests cannot be served now
        self._next_rid = api_index << RID_BITS
        self._unflushed: dict[Consumer, None] = {}  # those that took chunks since `handle` began
        self._sequences: dict[int, tuple[OpenRequest, OpenSequence]] = {}  # by rid; those that have not ended
        self._questions: dict[int, _Asked] = {}  # to a tokenizer, not answered yet
        self._held: dict[OpenRequest, None] = {}  # open, and not with an engine now
        self._choice: Choice[Engine] = Choice()
        self._killers: dict[bytes, None] = {}
        self.engines = tuple(Engine(number, post, self._choice, self._killers) for number, post in enumerate(posts))
        self._is_trying = False  # an engine works on requests that may have killed a process
        self.num_resumed = 0  # sequences that were submitted again
        self._refusal: str | None = None  # why nothing new is taken
        self._idle = asyncio.Event()
        self._idle.set()
        self._drain_rate = DrainRate(clock())
        self.late_beats: dict[str, int] = {}  # of followers; see `Ping`
        self.waits_for = ""  # the same
        self.pulses: dict[tuple[int, str], Pulse] = {}  # each process's last report, by its engine and name
        self.stats = Stats(latency_classes)

    def change(self, bounds: Bounds) -> None:
        """These hold from now on; see the constructor."""
        self._outage_wait_s, self._max_held = bounds["outage_wait_s"], bounds["max_held"]
        self._max_open = bounds["max_open"]
        self.stats.change(bounds["latency_classes"])

    @property
    def snapshots(self) -> list[Snapshot]:
        """The last reports of the cores that have reported, without those of engines that are away."""
        return [engine.snapshot for engine in self.engines if engine.snapshot is not None and not engine.is_away]

    @property
    def outage(self) -> Outage | None:
        """If no engine is whole: the outage that has lasted longest."""
        outages = [engine.outage for engine in self.engines if engine.outage is not None]
        return min(outages, key=lambda outage: outage.since) if len(outages) == len(self.engines) else None

    @property
    def num_open(self) -> int:
        """Sequences that have not ended."""
        return len(self._sequences)

    @property
    def num_requests(self) -> int:
        """Requests with sequences that have not ended."""
        return len(self._open_requests())

    @property
    def num_unanswered(self) -> int:
        """Sequences that the engine has not answered for: they are with the tokenizer."""
        return sum(request.num_unanswered for request in self._open_requests())

    @property
    def refusal(self) -> str | None:
        """Why new requests are refused, or None."""
        return self._refusal

    @property
    def retry_after_s(self) -> int:
        """When a request that is refused now may come again: by then what is open will have ended, here or in the
        engines."""
        num_ahead = max(len(self._sequences), sum(core.num_running + core.num_waiting for core in self.snapshots))
        return self._drain_rate.retry_after_s(num_ahead)

    def submit(self, submits: Sequence[Submit]) -> Stream:
        """Sends `submits` on, each with rids of its own (theirs are ignored). The stream's choices are theirs in order.

        The caller must `cancel` the stream in the end, which is harmless when it has finished. Raises ShuttingDown,
        RequestError."""
        if self._refusal is not None:
            raise ShuttingDown(self._refusal)
        if self._hindrance is not None:
            raise RequestError("unavailable", self._hindrance)
        if self._killers and fingerprint(submits) in self._killers:
            raise RequestError("internal", _KILLED)
        num_choices = sum(submit.n for submit in submits)
        num_open = len(self._sequences)
        if self._max_open is not None and num_open and num_open + num_choices > self._max_open:
            self.stats.errors["queue_full"] += num_choices
            raise RequestError("queue_full", f"{num_open} sequences are open already; try again later.")
        engine = self._choose(submits[0])
        if engine is None and sum(held.num_open for held in self._held) + num_choices > self._max_held:
            raise RequestError("queue_full", "Too many requests wait for the engine, which is not ready.")
        now = self._clock()
        self._drain_rate.note(now, is_busy=True)
        attainment = self.stats.attainment.get(submits[0].latency_class)
        request = OpenRequest(self._next_rid, submits, now, OutputBuffer(self._unflushed), attainment)
        self._next_rid += num_choices
        self._register(request)
        self._note_busy()
        for submit in submits:
            self.stats.asked(submit.n, submit.limits.max_tokens)
        if engine is None:
            self._hold(request)
        else:
            self._send(request, engine)
        return Stream(request, self._end)

    async def tokenize(self, prompt: TextPrompt | ChatPrompt, *, pieces: bool = False) -> Tokenized:
        """The ids of a prompt, and with `pieces` the text of each id. Raises RequestError."""
        answer = await self._ask(Tokenize(self._next_rid, prompt, pieces))
        assert isinstance(answer, Tokenized), answer
        return answer

    async def detokenize(self, ids: bytes, *, skip_special_tokens: bool = False) -> str:
        """The text of ids, which must be in the vocabulary. Raises RequestError."""
        answer = await self._ask(Detokenize(self._next_rid, ids, skip_special_tokens))
        assert isinstance(answer, Detokenized), answer
        return answer.text

    async def describe_tokenizer(self) -> Described:
        """The tokenizer's special tokens and chat template. Raises RequestError."""
        answer = await self._ask(Describe(self._next_rid))
        assert isinstance(answer, Described), answer
        return answer

    def handle(self, messages: Iterable[FromEngine]) -> None:
        """Takes everything that came in since the last call. Messages about ended sequences are dropped."""
        now = self._clock()
        for message in messages:
            match message:
                case TextBatch(chunks=chunks):
                    for chunk in chunks:
                        if (found := self._sequences.get(chunk.rid)) is not None:
                            request, sequence = found
                            self._take(request, sequence, chunk, now)
                case Accepted(rid=rid, num_prompt=num_prompt):
                    if (found := self._sequences.get(rid)) is not None:
                        request, sequence = found
                        request.accept(sequence, num_prompt)
                case Tokenized(rid=rid) | Detokenized(rid=rid) | Described(rid=rid):
                    if (asked := self._questions.get(rid)) is not None and not asked.answer.done():
                        asked.answer.set_result(message)
                case Failed(rid=rid):
                    error = RequestError(
                        message.kind, message.detail, param=message.param, num_tokens=message.num_tokens
                    )
                    if (asked := self._questions.get(rid)) is not None and not asked.answer.done():
                        asked.answer.set_exception(error)
                    if (found := self._sequences.get(rid)) is not None:
                        self._fail(*found, error, now)
                case Snapshot(engine=number):
                    self.engines[number].snapshot = message
                    if self._has_siblings:
                        self._choice.reported(self.engines[number], message.num_running + message.num_waiting)
                case Pulse(name=name, engine=number):
                    self.pulses[number, name] = message
                case Reset(engine=number):
                    self._lose(self.engines[number], message, now)
                case Restored(engine=number):
                    self._restore(self.engines[number], now)
        for consumer in self._unflushed:
            consumer.flush()
        self._unflushed.clear()

    def refuse(self, reason: str) -> None:
        """From now on, new requests get 503 with this sentence; open ones go on."""
        self._refusal = reason

    def hinder(self, reason: str | None) -> None:
        """From now on, requests get 503 with this sentence, also those that wait for an engine; None: no more."""
        self._hindrance = reason
        if reason is not None:
            for request in list(self._held):
                self._end(request, RequestError("unavailable", reason))
            for asked in self._questions.values():
                if asked.engine is None and not asked.answer.done():
                    asked.answer.set_exception(RequestError("unavailable", reason))

    def replaced(self, reason: str) -> None:
        """The engines have ended, and those that come compute another model: what they had ends with this reason, and
        what has waited for its first engine goes on waiting."""
        for request in self._open_requests():
            if request.was_sent:
                self._end(request, EngineFailed(reason))

    async def drained(self) -> None:
        """Returns when no request is open."""
        await self._idle.wait()

    async def vacated(self, number: int) -> None:
        """Sends an engine nothing new until it is restored; returns when no request is open there."""
        engine = self.engines[number]
        self._choice.leaves(engine, True)
        await engine.vacant.wait()

    def close(self, reason: str, *, has_failed: bool = False) -> None:
        """Ends every open request with an error that says `reason`, and refuses new ones. `has_failed`: the engine has
        failed, and an open request may be the cause."""
        self.refuse(reason)
        error = EngineFailed(reason) if has_failed else ShuttingDown(reason)
        for request in self._open_requests():
            self._end(request, error)
        for asked in self._questions.values():
            if not asked.answer.done():
                asked.answer.set_exception(error)

    def _open_requests(self) -> dict[OpenRequest, None]:
        """In the order of their rids."""
        return dict.fromkeys(request for request, _ in self._sequences.values())

    def _register(self, request: OpenRequest) -> None:
        self._sequences.update((sequence.rid, (request, sequence)) for sequence in request.open_sequences)

    # ── the outputs of requests ──────────────────────────────────────────────────────────────────────────────────────

    def _take(self, request: OpenRequest, sequence: OpenSequence, chunk: Chunk, now: float) -> None:
        stats = self.stats
        if chunk.times is not None and sequence.times is None:  # a resumed sequence began when it first began
            sequence.times = chunk.times
            stats.started(chunk.times)
        num_ids = len(chunk.ids) >> 2
        if num_ids:
            before = sequence.last_chunk_at
            if before is None:
                stats.time_to_first_token_s.observe(now - request.arrived)
                if request.attainment is not None:
                    request.attainment.ttft.observe(now - request.arrived)
                sequence.first_chunk_at = now
            else:
                stats.inter_token_latency_s.observe(now - before)
                if request.attainment is not None:
                    request.attainment.itl.observe(now - before)
            sequence.last_chunk_at = now
            request.num_tokens += num_ids
        sequence.entry.note(chunk)
        if self._is_trying:
            self._made_progress(request, num_ids)
        if not sequence.is_answered:
            request.answer(sequence)
        if chunk.finish is not None:
            self._close(request, sequence, chunk.finish, now, chunk.usage)
            stats.finished[chunk.finish] += 1
            if chunk.finish == "abort":  # not by us: the sequence would be closed already
                stats.aborts["unavailable"] += 1
                self._end(request, RequestError("unavailable", "The request was cancelled by the server."))
                return
            times, usage = sequence.times, chunk.usage
            if request.was_resumed and times is not None and usage is not None:
                chunk = replace(chunk, usage=replace(usage, num_cached=times.num_cached))
        if not request.buffer.put(sequence.index, chunk):
            request.buffer.take()
            self._end(request, HttpError(408, "Too much of the answer was left unread.", code="client_too_slow"))

    def _fail(self, request: OpenRequest, sequence: OpenSequence, error: RequestError, now: float) -> None:
        """The engine has failed the sequence, which ends the whole request."""
        self.stats.finished["error"] += 1
        self.stats.errors[error.kind] += 1
        self._close(request, sequence, f"error:{error.kind}", now)
        self._end(request, error)

    def _end(self, request: OpenRequest, error: Exception) -> None:
        """Ends what is open of `request`: the engine is told once, the reader gets `error`."""
        if sequences := request.open_sequences:
            reason = _abort_reason(error)
            now = self._clock()
            for sequence in sequences:
                self._close(request, sequence, f"abort:{reason}", now)
            self.stats.finished["abort"] += len(sequences)
            self.stats.aborts[reason] += len(sequences)
            if request in self._held:
                del self._held[request]
                request.release()
            elif request.engine is not None:
                self.engines[request.engine].post(Cancel(tuple(sequence.rid for sequence in sequences)))
        request.buffer.fail(error)

    def _close(
        self, request: OpenRequest, sequence: OpenSequence, outcome: str, now: float, usage: Usage | None = None
    ) -> None:
        passed = timeline(request.arrived, sequence.times, sequence.first_chunk_at, now)
        request.close(sequence, EndedSequence(sequence.index, outcome, passed, usage))
        del self._sequences[sequence.rid]
        if usage is not None and outcome != "abort":
            self.stats.completed(passed, usage)
        if not request.num_open:
            if request.engine is not None and request not in self._held:
                self.engines[request.engine].lift(request)
            if self._is_trying:
                self._made_progress(request, 0)
            longest = max((ended.usage.num_output for ended in request.ended if ended.usage is not None), default=0)
            if longest:
                self.stats.max_generation_tokens.observe(longest)
        self._drain_rate.note(now, is_busy=bool(self._sequences), num_ended=usage is not None)
        self._note_idle()

    # ── which engine gets a request ──────────────────────────────────────────────────────────────────────────────────

    def _choose(self, submit: Submit) -> Engine | None:
        """The engine for a request; None: none takes it now."""
        if len(self.engines) == 1:
            only = self.engines[0]
            return only if only.takes_requests and not only.is_leaving else None
        if not any(engine.is_able for engine in self.engines):
            return None
        prompt = beginning(submit)
        return self._choice.choose(prompt.blocks, prompt.conversation, self._clock(), key_of=prompt.key_of)

    def _hold(self, request: OpenRequest) -> None:
        """It waits for an engine: as long as it takes if one had admitted it, else for a while. One that may have
        killed twice waits for its own engine, which may never come if all of it was lost."""
        self._held[request] = None
        own = None if request.engine is None else self.engines[request.engine]
        is_patient = own is None or not own.is_away or request.num_deaths <= 1
        request.hold(self._outage_wait_s, self._give_up, is_patient=is_patient)

    def _give_up(self, request: OpenRequest) -> None:
        if request not in self._held:
            return
        own = None if request.engine is None else self.engines[request.engine]
        if own is not None and own.is_away and own.outage is not None and request.num_deaths > 1:
            self._end(request, EngineFailed(f"{_SUSPECT} {own.outage.reason}"))
        else:
            self._end(request, RequestError("unavailable", self._why_late))

    @property
    def _why_late(self) -> str:
        """Why what has waited was not served."""
        outage = self.outage
        return _OUTAGE if outage is None or outage.lost else f"{outage.reason} Try again later."

    def _lose(self, engine: Engine, reset: Reset, now: float) -> None:
        """What is open there is not with the engine any more."""
        before = engine.outage
        lost = reset.lost
        if before is not None:
            lost = tuple(dict.fromkeys((*before.lost, *lost))) if before.lost and lost else ()
        engine.outage = Outage(lost, reset.reason, now if before is None else before.since)
        kinds = [name.partition("-")[0] for name in reset.lost]
        self.stats.lost.update(kinds)
        requests = [r for r in self._open_requests() if r.engine == engine.number and r not in self._held]
        killer = engine.poison_detector.blame(r for r in requests if r.was_with(kinds))
        if not kinds or "core" in kinds or "worker" in kinds:  # with its prefix cache
            self._choice.lost(engine)
        if not kinds:
            engine.forget_load()
        engine.settle()
        if killer is not None:
            engine.poison_detector.remember(fingerprint(killer.submits))
            self._fail(killer, killer.open_sequences[0], RequestError("internal", _KILLED), now)
        for request in requests:
            if request.num_open:
                engine.lift(request)
                self._hold(request)
        for request in [r for r in self._held if r.engine == engine.number and r.num_deaths > 1]:
            self._hold(request)  # what it waits for may have changed
        for asked in self._questions.values():
            if asked.engine is engine:
                asked.engine = None
                asked.num_deaths += "tokenizer" in kinds
                if asked.num_deaths > 1 and not asked.answer.done():
                    asked.answer.set_exception(RequestError("internal", _KILLED))
        self._place_held()

    def _restore(self, engine: Engine, now: float) -> None:
        """The engine is whole. The suspects go first, and a few at a time; then all others."""
        if engine.outage is None:
            return
        if not engine.outage.lost:  # it was restarted; one that has healed within seconds gets its share at once
            self._choice.started(engine, now)
        engine.outage = None
        self._choice.leaves(engine, False)
        self._held = dict.fromkeys(sorted(self._held, key=lambda request: request.number))
        for request in self._held:
            if request.engine == engine.number and not request.num_unanswered:
                request.release()  # its engine has come
        engine.poison_detector.line_up(r for r in self._held if r.num_deaths and r.engine == engine.number)
        self._place_held()

    def _made_progress(self, request: OpenRequest, num_tokens: int) -> None:
        """The request, which may be a suspect, has got tokens or has ended."""
        if request.engine is None:
            return
        detector = self.engines[request.engine].poison_detector
        if detector:
            detector.made_progress(request, num_tokens)
            if not detector:
                self._place_held()

    def _place_held(self) -> None:
        """Sends on what waits, and asks again what was not answered, as far as engines take it now."""
        for engine in self.engines:
            while engine.takes_requests and (turn := engine.poison_detector.next()):
                for request in turn:
                    if request.num_open:
                        self._send(request, engine)
                    else:
                        engine.poison_detector.made_progress(request, 0)
            engine.settle()
        for request in list(self._held) if any(engine.is_able for engine in self.engines) else ():
            own = None if request.engine is None else self.engines[request.engine]
            if own is not None and own.keeps_back(request):
                continue
            found = own if own is not None and own.is_able else self._choose(request.submits[0])
            if found is None:
                continue
            self._send(request, found)
        self._is_trying = any(engine.poison_detector for engine in self.engines)
        for asked in self._questions.values():
            if asked.engine is None and not asked.answer.done():
                self._put(asked)

    def _send(self, request: OpenRequest, engine: Engine) -> None:
        """Submits what is open of it: again and under new rids, if an engine had it before."""
        self._held.pop(request, None)
        request.release()
        is_again = request.was_sent
        if is_again:
            for sequence in request.open_sequences:
                del self._sequences[sequence.rid]
        engine.place(request)
        submits = request.submissions(self._next_rid)
        if is_again:
            self._next_rid += len(request.sequences)
            self._register(request)
            self.num_resumed += len(submits)
        for submit in submits:
            engine.post(submit)

    # ── questions to a tokenizer ───────────────────────────────────────────────────────────────────────────────────

    async def _ask(self, question: Question) -> Answer:
        if self._refusal is not None:
            raise ShuttingDown(self._refusal)
        if self._hindrance is not None:
            raise RequestError("unavailable", self._hindrance)
        self._next_rid += 1
        answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._questions[question.rid] = asked = _Asked(question, answer)
        self._note_busy()
        self._put(asked)
        try:
            async with asyncio.timeout(None if self.outage is None else self._outage_wait_s):
                return await answer
        except TimeoutError:
            raise RequestError("unavailable", self._why_late) from None
        finally:
            del self._questions[question.rid]
            self._note_idle()

    def _put(self, asked: _Asked) -> None:
        """Asks the least busy engine that is whole."""
        whole = [engine for engine in self.engines if engine.outage is None]
        if whole:
            asked.engine = min(whole, key=lambda engine: engine.num_open)
            asked.engine.post(asked.question)

    def _note_busy(self) -> None:
        if self._idle.is_set():
            self._idle.clear()
            self._on_use(True)

    def _note_idle(self) -> None:
        if not self._sequences and not self._questions and not self._idle.is_set():
            self._idle.set()
            self._on_use(False)


def _abort_reason(error: Exception) -> str:
    """The label in /metrics for a sequence that was cut short by `error`."""
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
