"""`LLMEngine`: an engine in this process whose caller runs each step, with vLLM's methods. `LLM` is built on it.

engine = LLMEngine.from_engine_args(EngineArgs(model="Qwen/Qwen3-0.6B"))
engine.add_request("a", "Hello", SamplingParams(max_tokens=64))
while engine.has_unfinished_requests():
    for output in engine.step():
        ...
"""

import random
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Self

from ..api.output.parsers.registry import find_family
from ..config.config import EngineConfig
from ..errors import RequestError
from ..ipc.messages import (
    Cancel,
    ChatPrompt,
    Chunk,
    Failed,
    IdsPrompt,
    Limits,
    PairPrompt,
    Pooling,
    Sampling,
    Sleep,
    Submit,
    TextPrompt,
    TextSpec,
    Wake,
)
from ..procs.inline import Inline
from .metrics import Metric, metrics_of
from .outputs import CompletionOutput, RequestOutput
from .pooled import PoolingParams, PoolingRequestOutput, plain
from .prompts import Prompt, parse
from .sampling_params import RequestOutputKind, SamplingParams, checked, submit

if TYPE_CHECKING:
    from ..engine.text.tokenizer import Tokenizer
    from .engine_args import EngineArgs


@dataclass
class Request:
    """One open request."""

    id: str
    submit: Submit
    result: RequestOutput | None  # None: of a pooling request
    kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    open: set[int] = field(default_factory=set)  # rids
    vector: Chunk | None = None  # of a pooling request that has ended
    error: RequestError | None = None
    on_end: Callable[[], object] | None = None  # called at the end of each choice; such requests are not for `step`
    num_told: dict[int, tuple[int, int, bool]] = field(default_factory=dict)  # see `RequestOutput.news`


class LLMEngine:
    """An engine in this process."""

    def __init__(self, config: EngineConfig, *, seed: int | None = None) -> None:
        """`seed`: the requests without a seed get the same seeds in each run; None: random ones. Raises
        PagewireError."""
        self.config = config
        self._seeds: random.Random = random.Random(seed) if seed is not None else secrets.SystemRandom()
        self._reasoning = find_family(config.tool_call_parser, config.reasoning_parser).reasoning or ()
        self._by_rid: dict[int, Request] = {}
        self._by_id: dict[str, Request] = {}
        self._touched: dict[str, Request] = {}  # since the last step
        self._failed: list[Request] = []  # of those with an `on_end`
        self._next_rid = 1
        self.inline = Inline(config, on_chunk=self._on_chunk, on_failed=self._on_failed)

    @classmethod
    def from_engine_args(cls, engine_args: "EngineArgs", **options: object) -> Self:
        """Loads the model. `options`: vLLM's other arguments, which are ignored. Raises PagewireError."""
        return cls(engine_args.prepare(), seed=engine_args.seed)

    def close(self) -> None:
        """Closes the engine, which `kv_connector` and `record_trace` need."""
        self.inline.close()

    # ── requests ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def add_request(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams | PoolingParams,
        arrival_time: float | None = None,
        lora_request: None = None,
        tokenization_kwargs: None = None,
        trace_headers: None = None,
        priority: int = 0,
    ) -> str:
        """Adds a request, which the next steps compute. `arrival_time` and the next three are vLLM's; the three must be
        None. Raises RequestError if it is refused, ValueError if its id is in use or a parameter is out of bounds."""
        if not isinstance(request_id, str):
            raise TypeError(f"request_id must be a text, not {type(request_id).__name__}")
        if request_id in self._by_id:
            raise ValueError(f"request_id {request_id!r} is in use")
        if lora_request is not None or tokenization_kwargs is not None:
            raise ValueError("lora_request and tokenization_kwargs are not there: load the adapter as the model.")
        parsed = parse(prompt)
        if isinstance(params, PoolingParams):
            request = self.pooling_request(request_id, parsed.wire, params.pooling(self.config.model.purpose))
        else:
            request = self.request(request_id, parsed.wire, parsed.text, params, priority, parsed.cache_salt)
        self.add(request)
        self.inline.read_prompts()
        if request.error is not None:
            self._touched.pop(request.id, None)
            raise request.error
        return request_id

    def request(
        self,
        request_id: str,
        prompt: TextPrompt | ChatPrompt | IdsPrompt,
        text: str | None,
        params: SamplingParams,
        priority: int,
        cache_salt: str = "",
    ) -> Request:
        """A generating request that is not added yet. Raises ValueError."""
        if params.seed is None:
            params = replace(params, seed=self._seeds.getrandbits(62))
        wire = submit(self._take_rids(params.n), prompt, params, priority, self._reasoning, cache_salt)
        result = RequestOutput(request_id, text, [], [CompletionOutput(i) for i in range(params.n)])
        return Request(request_id, wire, result, params.output_kind)

    def pooling_request(
        self, request_id: str, prompt: TextPrompt | IdsPrompt | PairPrompt, pooling: Pooling
    ) -> Request:
        """A request for a vector that is not added yet. Raises ValueError."""
        text = TextSpec(detokenize=False, prompt=True)
        wire = Submit(self._take_rids(1), 1, prompt, Sampling(), Limits(max_tokens=0), text, pooling=pooling)
        return Request(request_id, checked(wire), None)

    def add(self, request: Request) -> None:
        """Adds a request whose id is not in use."""
        request.open = {request.submit.rid + i for i in range(request.submit.n)}
        self._by_rid.update(dict.fromkeys(request.open, request))
        self._by_id[request.id] = request
        self.inline.post("tokenizer", request.submit)

    def abort_request(self, request_ids: str | Sequence[str]) -> None:
        """Ends requests; no step returns them any more. Unknown ids are ignored."""
        for name in [request_ids] if isinstance(request_ids, str) else request_ids:
            if (request := self._by_id.get(name)) is not None:
                self.inline.post("tokenizer", Cancel(tuple(request.open)))
                for rid in [*request.open]:
                    self._end(request, rid)
                self._touched.pop(name, None)
        if not self._by_id:
            self.inline.run()  # frees what they held

    def has_unfinished_requests(self) -> bool:
        """Whether `step` has something to return."""
        return bool(self._by_id or self._touched)

    def get_num_unfinished_requests(self) -> int:
        return len(self._by_id.keys() | self._touched.keys())

    def step(self) -> list[RequestOutput | PoolingRequestOutput]:
        """Computes until requests have new output, and returns them. Nothing is returned if there are no requests, or
        if the engine is asleep. Raises RequestError if a request fails, which is not open any more; the others are."""
        self.inline.run(until=lambda: bool(self._touched))
        for request in [*self._touched.values()]:
            if request.error is not None:
                del self._touched[request.id]
                raise request.error
        touched, self._touched = self._touched, {}
        outputs = [self._output(request) for request in touched.values()]
        return [output for output in outputs if output is not None]

    def run(self, requests: Sequence[Request]) -> None:
        """Computes added requests, which have an `on_end`, to their end. If one fails, the others are cancelled, and
        its RequestError is raised."""
        self._failed.clear()
        self.inline.run(until=lambda: bool(self._failed))
        if self._failed:
            error = self._failed[0].error
            self.abort_request([request.id for request in requests])
            self.inline.run(until=lambda: bool(self._touched))
            assert error is not None
            raise error
        assert not any(request.open for request in requests), "the engine became idle with open requests"

    # ── the engine ───────────────────────────────────────────────────────────────────────────────────────────────────

    def sleep(self, level: int = 1) -> None:
        """Releases the memory of weights and KV cache; open requests wait. `level`: vLLM's, without effect. Raises
        RequestError if it cannot be."""
        self._change_sleep(Sleep())

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Restores the memory. `tags`: vLLM's, without effect. Raises RequestError if it cannot be."""
        self._change_sleep(Wake())

    def is_sleeping(self) -> bool:
        return self.inline.scheduler.is_paused

    def _change_sleep(self, message: Sleep | Wake) -> None:
        self.inline.slept = None
        self.inline.post("core", message)
        self.inline.run(until=lambda: self.inline.slept is not None)
        if problem := self.inline.sleep_problem:
            raise RequestError("unavailable", problem)

    def get_metrics(self) -> list[Metric]:
        """Counters and gauges, with vLLM's names."""
        return metrics_of(self.inline.scheduler, self.config.served_model_names[0])

    def get_tokenizer(self) -> "Tokenizer":
        """The model's tokenizer."""
        from ..engine.text.tokenizer import load_tokenizer

        return load_tokenizer(Path(self.config.model.path))

    @property
    def tokenizer(self) -> "Tokenizer":
        return self.get_tokenizer()

    def _take_rids(self, num: int) -> int:
        first, self._next_rid = self._next_rid, self._next_rid + max(1, num)
        return first

    def _output(self, request: Request) -> RequestOutput | PoolingRequestOutput | None:
        """What a step returns of a request."""
        if request.vector is not None:
            pooling = request.submit.pooling
            assert pooling is not None, request
            return plain(request.vector, pooling.how, self.config.model.purpose.size, request.id)
        result = request.result
        assert result is not None, request
        if request.kind is RequestOutputKind.FINAL_ONLY and not result.finished:
            return None
        return result.news(request.num_told) if request.kind is RequestOutputKind.DELTA else result.copy()

    def _on_failed(self, failed: Failed) -> None:
        if (request := self._by_rid.get(failed.rid)) is None:
            return
        error = RequestError(failed.kind, failed.detail, param=failed.param, num_tokens=failed.num_tokens)
        request.error = request.error or error
        if request.on_end is not None:
            self._failed.append(request)
        else:
            self._touched[request.id] = request
        others = tuple(request.open - {failed.rid})
        for rid in [*request.open]:
            self._end(request, rid)
        if others:
            self.inline.post("tokenizer", Cancel(others))

    def _on_chunk(self, chunk: Chunk) -> None:
        if (request := self._by_rid.get(chunk.rid)) is None:
            return  # of a cancelled request
        if request.on_end is None:
            self._touched[request.id] = request
        if request.result is None:
            if chunk.vector:
                request.vector = chunk
            self._end(request, chunk.rid)
            return
        request.result.add(chunk.rid - request.submit.rid, chunk)
        if chunk.finish is not None:
            self._end(request, chunk.rid)

    def _end(self, request: Request, rid: int) -> None:
        request.open.discard(rid)
        self._by_rid.pop(rid, None)
        if not request.open:
            self._by_id.pop(request.id, None)
        if request.on_end is not None:
            request.on_end()
