"""The same actors in one process, for the offline API and for tests: no sockets, no event loop, one thread. The stages
of a pipeline run one after the other. Of several tensor-parallel ranks only the first is in this process
(`inline_ranks.py`).

Messages are passed as objects. `run` lets each actor handle its messages until there are none and no KV transfer or
grammar is pending; the worker runs one plan at a time.
"""

import contextlib
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from ..config.config import EngineConfig
from ..engine.core.scheduler import Scheduler
from ..engine.parallel.rank import RankInfo
from ..errors import ConfigError
from ..ipc.actor import Actor
from ..ipc.messages import (
    Accepted,
    Chunk,
    Failed,
    Hidden,
    LateMasks,
    Message,
    OpenCache,
    PlaceExperts,
    ReadExperts,
    SampledIds,
    Sleep,
    Slept,
    Snapshot,
    StepPlan,
    TextBatch,
    Wake,
)
from .core import CoreActor
from .detokenizer import DetokenizerActor
from .grammar import GrammarActor, load_grammars
from .grammar_sandbox import Load
from .inline_ranks import InlineRanks
from .tokenizer import TokenizerActor
from .topology import workers
from .worker import Worker

_POLL_S = 0.0005  # between polls of pending KV transfers and grammars, when nothing else is to be done


class Inline:
    """tokenizer → core ⇄ worker and grammar → detokenizer; the caller takes the place of the api."""

    def __init__(
        self,
        config: EngineConfig,
        *,
        on_chunk: Callable[[Chunk], None],
        on_failed: Callable[[Failed], None],
        progress: Callable[[int, int], None] | None = None,
        grammars: Load = load_grammars,
    ) -> None:
        """Loads the model. Raises PagewireError."""
        if config.tensor_parallel_size > 1 and config.pipeline_parallel_size > 1:
            raise ConfigError(
                "LLM has stages of one rank each: use AsyncLLM or a server, or leave one of the sizes out."
            )
        if config.kv_domains > 1:
            raise ConfigError("LLM has no KV domains: use AsyncLLM or a server, or leave kv_domains out.")
        if config.pipeline_parallel_size > 1 and not config.stages_by_mail:
            raise ConfigError(
                "LLM has no stages on GPUs: use AsyncLLM or a server, or leave pipeline_parallel_size out."
            )
        if config.client_address is not None:
            raise ConfigError("LLM does not listen at client_address: use EngineClient.start, or a server.")
        infos = [RankInfo(rank, stage=rank, first=rank) for rank in range(config.pipeline_parallel_size)]
        self._ranks = InlineRanks(config) if config.tensor_parallel_size > 1 else None
        if self._ranks is not None:
            infos = [self._ranks.first]
        self._workers = {
            name: Worker(config, rank_info=info, progress=None if info.rank else progress)
            for name, info in zip(workers(config.num_ranks), infos, strict=False)
        }
        self.slept: Slept | None = None  # the answer to the last `Sleep` or `Wake`
        self._on_chunk = on_chunk
        self._on_failed = on_failed
        self._worker = self._workers["worker"]
        self._mail: dict[str, deque[Message]] = {
            name: deque() for name in ("tokenizer", "core", "grammar", *self._workers, "detokenizer", "api")
        }
        self._core = CoreActor(config)
        self._grammar = GrammarActor(config, grammars)
        self._actors: dict[str, Actor[Any]] = {  # Any: the topology says which messages each is sent
            "tokenizer": TokenizerActor(config),
            "core": self._core,
            "grammar": self._grammar,
            "detokenizer": DetokenizerActor(config),
        }
        try:
            for actor in self._actors.values():
                actor.start(self.post)
            for worker in self._workers.values():
                worker.start(self.post)
            self.run()
        except BaseException as error:
            reason = self._ranks.explain(error) if self._ranks is not None else error
            self.close()
            if reason is error:
                raise
            raise reason from None

    @property
    def scheduler(self) -> Scheduler:
        """The core's scheduler, for tests and benchmarks that read its counters."""
        scheduler = self._core.scheduler
        assert isinstance(scheduler, Scheduler), "KV domains are refused"
        return scheduler

    @property
    def sleep_problem(self) -> str:
        """Why the last `Sleep` or `Wake` failed; empty: it did not."""
        return "" if self.slept is None else self.slept.problem

    def post(self, receiver: str, message: Message) -> None:
        """The caller posts `Submit` and `Cancel` to the tokenizer."""
        if receiver in self._mail:
            self._mail[receiver].append(message)
        elif self._ranks is not None:
            self._ranks.send(receiver, message)

    def read_prompts(self) -> None:
        """Lets the tokenizer read what was posted, so that a refusal is known; nothing is computed."""
        messages, self._mail["tokenizer"] = [*self._mail["tokenizer"]], deque()
        self._actors["tokenizer"].handle(messages)
        while self._mail["api"]:
            self._hear(self._mail["api"].popleft())

    def run(self, *, until: Callable[[], bool] = lambda: False) -> None:
        """Runs until no messages are left and nothing is pending, or until `until()` is true, which is called after
        each round."""
        while not until():
            busy = False
            for name, actor in self._actors.items():
                if mail := self._mail[name]:
                    messages = list(mail)
                    mail.clear()
                    actor.handle(messages)
                    busy = True
            while self._mail["api"]:
                self._hear(self._mail["api"].popleft())
                busy = True
            for name, worker in self._workers.items():
                if self._mail[name]:
                    self._tell_worker(worker, self._mail[name].popleft())
                    busy = True
                if worker.num_computing:
                    worker.answer(wait=not busy)
                    busy = True
                elif worker.num_transfers:
                    worker.poll()
            busy |= self._hear_ranks(wait=False)
            if self._grammar.num_pending:
                self._grammar.poll()
            if busy or any(self._mail.values()):
                continue
            if self._ranks is not None and self._ranks.is_waiting:
                self._hear_ranks(wait=True)
            elif self._core.scheduler.asks_again:
                time.sleep(_POLL_S)
                self._core.handle([])
            elif any(worker.num_transfers for worker in self._workers.values()) or self._grammar.num_pending:
                time.sleep(_POLL_S)
            elif self._core.awaits_ranks:
                self._hear_ranks(wait=True)
            else:
                return

    def _hear_ranks(self, *, wait: bool) -> bool:
        """Takes in what ranks in other processes have sent. Whether there was something."""
        if self._ranks is None:
            return False
        heard = list(self._ranks.hear(wait=wait))
        self._mail["core"].extend(heard)
        return bool(heard)

    def close(self) -> None:
        try:
            for actor in self._actors.values():
                # `stop` of these actors does not wait, so it runs without a loop; the caller may be running one.
                with contextlib.suppress(StopIteration):
                    actor.stop(0.0).__await__().__next__()
        finally:
            for worker in self._workers.values():
                worker.close()
            if self._ranks is not None:
                self._ranks.close()

    def _tell_worker(self, worker: Worker, message: Message) -> None:
        try:
            self._do(worker, message)
        except RuntimeError as error:
            reason = error if self._ranks is None else self._ranks.explain(error)
            if reason is error:
                raise
            raise reason from None

    def _do(self, worker: Worker, message: Message) -> None:
        match message:
            case StepPlan() | LateMasks() | Sleep() | Wake() | Hidden() | SampledIds() | ReadExperts() | PlaceExperts():
                worker.take(message)
            case OpenCache():
                self.facts = worker.open(message)

    def _hear(self, message: Message) -> None:
        match message:
            case TextBatch():
                for chunk in message.chunks:
                    self._on_chunk(chunk)
            case Failed():
                self._on_failed(message)
            case Slept():
                self.slept = message
            case _:
                assert isinstance(message, Accepted | Snapshot), message
