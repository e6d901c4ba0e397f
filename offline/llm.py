"""The offline API: `LLM(model).generate(prompts, SamplingParams(...))`, with vLLM's names.

The whole engine runs in the calling process, without other processes or sockets.
"""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self, cast

import msgspec

from ..api.output.beam_search import BeamSearch, BeamSearchOutput, BeamSearchParams
from ..api.output.parsers.registry import find_family
from ..config.flags import from_options
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
    Submit,
    TextPrompt,
    TextSpec,
    TokenLogprob,
    bytes_to_ids,
    ids_to_bytes,
)
from ..procs.inline import Inline
from ..procs.prepare import prepare
from .pooled import EmbeddingRequestOutput, PoolingRequestOutput, ScoringRequestOutput, embedding, hidden_states, score
from .sampling_params import SamplingParams, checked, submit

if TYPE_CHECKING:
    from ..engine.text.tokenizer import Tokenizer

_DEFAULTS = {"pipeline_depth": 1, "max_queued_requests": 2**31, "max_queued_tokens": 2**62}  # all prompts are queued
Prompt = str | Sequence[int]
Conversation = Sequence[Mapping[str, object]]


@dataclass(frozen=True)
class Logprob:
    """One candidate token of one position."""

    logprob: float  # natural log
    rank: int | None  # 1: most likely; None: not among the top candidates
    decoded_token: str


@dataclass
class CompletionOutput:
    """One output of one prompt."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[dict[int, Logprob]] | None = None  # by position: id → candidate
    cumulative_logprob: float | None = None
    finish_reason: str | None = None  # "stop" or "length"
    stop_reason: str | int | None = None  # the stop string or stop token id that ended it


@dataclass
class RequestOutput:
    """One prompt and its outputs."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    num_cached_tokens: int = 0
    finished: bool = False

    def add(self, index: int, chunk: Chunk) -> None:
        """Appends more of one output."""
        output = self.outputs[index]
        output.text += chunk.text
        output.token_ids.extend(bytes_to_ids(chunk.ids))
        if chunk.logprobs is not None:
            output.logprobs = (output.logprobs or []) + [_candidates(position) for position in chunk.logprobs]
            output.cumulative_logprob = (output.cumulative_logprob or 0.0) + sum(
                p.chosen.logprob for p in chunk.logprobs
            )
        if chunk.prompt is not None:
            self.prompt_token_ids = list(bytes_to_ids(chunk.prompt.ids))
            if self.prompt is None:
                self.prompt = chunk.prompt.text
            if chunk.prompt.logprobs is not None:
                self.prompt_logprobs = [None if p is None else _candidates(p) for p in chunk.prompt.logprobs]
        if chunk.finish is not None:
            output.finish_reason, output.stop_reason = chunk.finish, chunk.stop_reason
            if chunk.usage is not None:
                self.num_cached_tokens = max(self.num_cached_tokens, chunk.usage.num_cached)
            self.finished = all(other.finish_reason for other in self.outputs)


class LLM:
    """A model in this process."""

    def __init__(self, model: str = "", **options: object) -> None:
        """`model`: a folder or a Hub name; empty: the demo model. `options`: settings by name, such as
        `dtype="float32"`, `max_model_len=4096`, `kv_cache_memory="2G"`. Raises ConfigError or CheckpointError."""
        config = from_options("LLM", {**_DEFAULTS, "model": model, **options})
        self._outputs: dict[int, CompletionOutput] = {}  # by rid
        self._pooled: dict[int, Chunk] = {}  # by rid: the vector of a pooling request
        self._requests: dict[int, RequestOutput] = {}  # by rid
        self._open: set[int] = set()
        self._failures: list[RequestError] = []
        self._next_rid = 1
        self._config = prepare(config)
        self._reasoning = find_family(self._config.tool_call_parser, self._config.reasoning_parser).reasoning or ()
        self._engine = Inline(self._config, on_chunk=self._on_chunk, on_failed=self._on_failed)

    def close(self) -> None:
        """Closes the engine, which `kv_connector` and `record_trace` need. Leaving a `with` block also does it."""
        self._engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def get_tokenizer(self) -> "Tokenizer":
        """The model's tokenizer."""
        from ..engine.text.tokenizer import load_tokenizer

        return load_tokenizer(Path(self._config.model.path))

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        priority: Sequence[int] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Completes one prompt or many (text or token ids); the results are in their order. `priority`: one number for
        each prompt, the lowest runs first (with `scheduling_policy="priority"`). Raises RequestError if a prompt is
        refused."""
        many = _as_list(prompts)
        texts = [prompt if isinstance(prompt, str) else None for prompt in many]
        return self._run(_plain_prompts(many), texts, sampling_params, priority, use_tqdm)

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        tools: Sequence[Mapping[str, object]] | None = None,
        chat_template_kwargs: Mapping[str, object] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        priority: Sequence[int] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Answers one conversation or many, rendered by the model's chat template; otherwise as `generate`."""
        one = len(messages) > 0 and isinstance(messages[0], Mapping)
        many = cast("Sequence[Conversation]", [messages] if one else messages)
        wire = [
            chat_prompt(conversation, tools, chat_template_kwargs, add_generation_prompt, continue_final_message)
            for conversation in many
        ]
        return self._run(wire, [None] * len(wire), sampling_params, priority, use_tqdm)

    def beam_search(self, prompts: Prompt | Sequence[Prompt], params: BeamSearchParams) -> list[BeamSearchOutput]:
        """The `beam_width` best outputs of each prompt. Raises RequestError if a prompt is refused, ValueError."""
        tokenizer = self.get_tokenizer()
        results = []
        for prompt in _as_list(prompts):
            ids = tokenizer.encode(prompt, True) if isinstance(prompt, str) else list(prompt)
            ends = frozenset() if params.ignore_eos else frozenset(self._config.model.eos_token_ids)
            room = max(1, self._engine.scheduler.max_model_len - len(ids))
            search = BeamSearch(ids, replace(params, max_tokens=min(room, params.max_tokens)), ends)
            sampling = SamplingParams(
                temperature=0, max_tokens=1, logprobs=search.num_candidates, ignore_eos=True, detokenize=False
            )
            while beams := search.prompts:
                outputs = [
                    request.outputs[0].logprobs or [{}] for request in self.generate(beams, sampling, use_tqdm=False)
                ]
                search.take([{id: c.logprob for id, c in logprobs[0].items()} for logprobs in outputs])
            result = search.output()
            for sequence in result.sequences:
                sequence.text = tokenizer.decode(sequence.tokens[len(ids) :], skip_special_tokens=True)
            results.append(result)
        return results

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        dimensions: int | None = None,
        truncate_prompt_tokens: int | None = None,
        use_tqdm: bool = True,
    ) -> list[EmbeddingRequestOutput]:
        """One vector for each prompt, pooled as the model's configuration says. `dimensions`: shortens the vectors.
        `truncate_prompt_tokens`: cuts off the end of longer prompts. Raises RequestError if a prompt is refused."""
        purpose = self._config.model.purpose
        pooling = Pooling(purpose.pooling, purpose.is_normalized, dimensions, truncate_prompt_tokens)
        default = purpose.prompts.get(purpose.default_prompt or "", "")
        return [*map(embedding, self._pool(_plain_prompts(prompts, default), pooling, "embedding", use_tqdm))]

    def encode(
        self, prompts: Prompt | Sequence[Prompt], *, truncate_prompt_tokens: int | None = None, use_tqdm: bool = True
    ) -> list[PoolingRequestOutput]:
        """The last hidden state of each token of each prompt. Raises RequestError if a prompt is refused."""
        pooling = Pooling("all", truncate=truncate_prompt_tokens)
        size = self._config.model.purpose.size
        chunks = self._pool(_plain_prompts(prompts), pooling, "encoding", use_tqdm)
        return [hidden_states(chunk, size) for chunk in chunks]

    def score(
        self,
        text_1: str | Sequence[str],
        text_2: str | Sequence[str],
        *,
        truncate_prompt_tokens: int | None = None,
        use_tqdm: bool = True,
    ) -> list[ScoringRequestOutput]:
        """Scores each pair of texts with a cross-encoder. A single `text_1` is paired with every `text_2`. Raises
        RequestError if a pair is refused, ValueError if the numbers of texts differ."""
        second = [text_2] if isinstance(text_2, str) else list(text_2)
        first = [text_1] if isinstance(text_1, str) else list(text_1)
        if len(first) == 1:
            first *= len(second)
        if len(first) != len(second):
            raise ValueError(f"{len(first)} texts in text_1, but {len(second)} in text_2")
        pairs = [PairPrompt(a, b) for a, b in zip(first, second, strict=True)]
        return [*map(score, self._pool(pairs, Pooling("score", truncate=truncate_prompt_tokens), "scoring", use_tqdm))]

    def _pool(
        self, prompts: Sequence[TextPrompt | IdsPrompt | PairPrompt], pooling: Pooling, doing: str, use_tqdm: bool
    ) -> list[Chunk]:
        """The vectors, in the order of the prompts."""
        text = TextSpec(detokenize=False, prompt=True)
        first, self._next_rid = self._next_rid, self._next_rid + len(prompts)
        submits = [
            checked(Submit(first + i, 1, prompt, Sampling(), Limits(max_tokens=0), text, pooling=pooling))
            for i, prompt in enumerate(prompts)
        ]
        try:
            self._work(submits, doing, use_tqdm)
            return [self._pooled[submit.rid] for submit in submits]
        finally:
            self._pooled.clear()

    def _run(
        self,
        prompts: Sequence[TextPrompt | ChatPrompt | IdsPrompt],
        texts: Sequence[str | None],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        priority: Sequence[int] | None,
        use_tqdm: bool,
    ) -> list[RequestOutput]:
        if sampling_params is None or isinstance(sampling_params, SamplingParams):
            sampling_params = [sampling_params or SamplingParams()] * len(prompts)
        if len(sampling_params) != len(prompts):
            raise ValueError(f"{len(prompts)} prompts but {len(sampling_params)} sampling_params")
        ranks = [0] * len(prompts) if priority is None else priority
        if len(ranks) != len(prompts):
            raise ValueError(f"{len(prompts)} prompts but {len(ranks)} priorities")
        results, submits = [], []
        for i, (prompt, text, params, rank) in enumerate(zip(prompts, texts, sampling_params, ranks, strict=True)):
            submits.append(submit(self._next_rid, prompt, params, rank, self._reasoning))
            self._next_rid += params.n
            results.append(RequestOutput(str(i), text, [], [CompletionOutput(k) for k in range(params.n)]))
        for request, result in zip(submits, results, strict=True):  # only now: `submit` raises for an invalid one
            for output in result.outputs:
                rid = request.rid + output.index
                self._outputs[rid], self._requests[rid] = output, result
        try:
            self._work(submits, "generating", use_tqdm)
        finally:
            self._outputs.clear()
            self._requests.clear()
        return results

    def _work(self, submits: Sequence[Submit], doing: str, use_tqdm: bool) -> None:
        """Runs the engine until all have ended. If one is refused, cancels the others and raises RequestError."""
        self._open = {submit.rid + i for submit in submits for i in range(submit.n)}
        self._failures.clear()
        from tqdm import tqdm

        with tqdm(total=len(self._open), desc=doing, unit="output", disable=not use_tqdm, file=sys.stderr) as bar:
            self._bar = bar
            for request in submits:
                self._engine.post("tokenizer", request)
            self._engine.run(until=lambda: bool(self._failures))
        if self._failures:
            self._engine.post("tokenizer", Cancel(tuple(self._open)))
            self._engine.run()
            raise self._failures[0]
        assert not self._open, "the engine became idle with open requests"

    def _on_failed(self, failed: Failed) -> None:
        self._open.discard(failed.rid)
        error = RequestError(failed.kind, failed.detail, param=failed.param, num_tokens=failed.num_tokens)
        self._failures.append(error)

    def _on_chunk(self, chunk: Chunk) -> None:
        if chunk.vector:
            self._pooled[chunk.rid] = chunk
            self._end(chunk.rid)
            return
        if chunk.rid not in self._outputs:
            return  # the end of a cancelled pooling request
        self._requests[chunk.rid].add(self._outputs[chunk.rid].index, chunk)
        if chunk.finish is not None:
            self._end(chunk.rid)

    def _end(self, rid: int) -> None:
        self._open.discard(rid)
        self._bar.update(1)


def _as_list(prompts: Prompt | Sequence[Prompt]) -> Sequence[Prompt]:
    one = isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], int))
    return cast("Sequence[Prompt]", [prompts] if one else prompts)


def _plain_prompts(prompts: Prompt | Sequence[Prompt], prefix: str = "") -> list[TextPrompt | IdsPrompt]:
    """`prefix`: put before each text."""
    return [
        TextPrompt(prefix + p) if isinstance(p, str) else IdsPrompt(ids_to_bytes(list(p))) for p in _as_list(prompts)
    ]


def chat_prompt(
    messages: Conversation,
    tools: Sequence[Mapping[str, object]] | None,
    chat_template_kwargs: Mapping[str, object] | None,
    add_generation_prompt: bool,
    continue_final_message: bool,
) -> ChatPrompt:
    encode = msgspec.json.encode
    return ChatPrompt(
        encode(messages),
        encode(tools) if tools else b"",
        encode(chat_template_kwargs) if chat_template_kwargs else b"",
        add_generation_prompt,
        continue_final_message,
    )


def _candidates(position: TokenLogprob) -> dict[int, Logprob]:
    found = {c.id: Logprob(c.logprob, rank, c.token) for rank, c in enumerate(position.top, start=1)}
    chosen = position.chosen
    return {chosen.id: found.get(chosen.id, Logprob(chosen.logprob, None, chosen.token))} | found
