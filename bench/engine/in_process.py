"""An engine in this process, with the times of every request: for benchmarks of the scheduler and the KV cache.

There is no socket between a plan and its tokens, so only the engine itself is measured. Everything runs in one thread:
a token's time is when its text is ready.
"""

import json
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

from ...config.flags import convert
from ...engine.core.scheduler import Scheduler
from ...ipc.messages import (
    Cancel,
    ChatPrompt,
    Chunk,
    Failed,
    IdsPrompt,
    Limits,
    Sampling,
    Submit,
    TextSpec,
    Usage,
    ids_to_bytes,
)
from ...procs.inline import Inline
from ...procs.prepare import prepare

_IDLE_S = 0.0002  # sleep when the engine has nothing to do


@dataclass
class Timed:
    """One request. Times are seconds of `time.perf_counter`."""

    rid: int
    sent: float
    times: list[float] = field(default_factory=list)  # of its tokens
    usage: Usage | None = None
    ended: bool = False

    @property
    def first_ms(self) -> float:
        return (self.times[0] - self.sent) * 1e3

    @property
    def total_ms(self) -> float:
        return (self.times[-1] - self.sent) * 1e3

    @property
    def gaps_ms(self) -> list[float]:
        """Times between its tokens."""
        return [(b - a) * 1e3 for a, b in pairwise(self.times)]


class Engine:
    def __init__(self, model: Path, **options: object) -> None:
        """`options`: settings by name."""
        config = convert({"pipeline_depth": 1, "model": str(model), **options})
        self._open: dict[int, Timed] = {}
        self._num_sent = 0
        self._inline = Inline(prepare(config), on_chunk=self._on_chunk, on_failed=self._on_failed)

    @property
    def scheduler(self) -> Scheduler:
        return self._inline.scheduler

    def send(
        self,
        prompt: Sequence[int] | ChatPrompt,
        num_tokens: int,
        *,
        priority: int = 0,
        tenant: str = "",
        latency_class: str = "",
    ) -> Timed:
        """Adds a greedy request for exactly `num_tokens` tokens; `run` computes it."""
        self._num_sent += 1
        request = Timed(self._num_sent, time.perf_counter())
        self._open[request.rid] = request
        submit = Submit(
            request.rid,
            1,
            prompt if isinstance(prompt, ChatPrompt) else IdsPrompt(ids_to_bytes(list(prompt))),
            Sampling(temperature=0.0),
            Limits(num_tokens, (), True),
            TextSpec(detokenize=False),
            priority=priority,
            tenant=tenant,
            latency_class=latency_class,
        )
        self._inline.post("tokenizer", submit)
        return request

    def cancel(self, requests: Sequence[Timed]) -> None:
        for request in requests:
            self._open.pop(request.rid, None)
        self._inline.post("tokenizer", Cancel(tuple(request.rid for request in requests)))
        self._inline.run()

    def run(self, until: Callable[[], bool] | None = None) -> None:
        """Runs until `until()` is true, which is called after each step, or until every request has ended."""
        done = until or (lambda: not self._open)
        while not done():
            self._inline.run(until=done)
            if not done():
                time.sleep(_IDLE_S)  # between arrivals, or while KV is transferred

    def close(self) -> None:
        self._inline.close()

    def _on_chunk(self, chunk: Chunk) -> None:
        if (request := self._open.get(chunk.rid)) is None:
            return  # cancelled
        request.times += [time.perf_counter()] * (len(chunk.ids) // 4)
        if chunk.finish is not None:
            request.usage = chunk.usage
            request.ended = True
            del self._open[chunk.rid]

    def _on_failed(self, failed: Failed) -> None:
        raise SystemExit(f"the engine refused a request: {failed.detail}")


def stretched(model: Path, folder: Path, num_positions: int) -> Path:
    """A copy of a model that declares a longer context. Its output there is nonsense, but takes as long."""
    shutil.copytree(model, folder)
    path = folder / "config.json"
    config = json.loads(path.read_text()) | {"max_position_embeddings": num_positions}
    path.write_text(json.dumps(config))
    return folder
