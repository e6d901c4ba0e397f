"""The offline API: `LLM(model).generate(prompts, SamplingParams(...))`, with vLLM's names.

The whole engine runs in the calling process, without other processes or sockets.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple, Self, cast

import msgspec

from ..api.output.beam_search import BeamSearch, BeamSearchOutput, BeamSearchParams
from ..ipc.messages import ChatPrompt, Chunk, IdsPrompt, PairPrompt, Pooling, TextPrompt, bytes_to_ids
from .engine_args import EngineArgs
from .llm_engine import LLMEngine, Request
from .metrics import Metric
from .outputs import RequestOutput
from .pooled import (
    ClassificationRequestOutput,
    EmbeddingRequestOutput,
    PoolingParams,
    PoolingRequestOutput,
    ScoringRequestOutput,
    classification,
    embedding,
    plain,
    score,
)
from .prompts import Parsed, Prompt, as_list, parse
from .sampling_params import SamplingParams

if TYPE_CHECKING:
    from ..engine.text.tokenizer import Tokenizer

_DEFAULTS = {"pipeline_depth": 1, "max_queued_requests": 2**31, "max_queued_tokens": 2**62}  # all prompts are queued
Conversation = Sequence[Mapping[str, object]]
UseTqdm = bool | Callable[..., Any]  # whether to show a progress bar, or what to use for tqdm.tqdm


class LLM:
    """A model in this process."""

    def __init__(self, model: str = "", *, tokenizer: Any = None, seed: Any = None, **options: object) -> None:
        """`model`: a folder or a Hub name; empty: the demo model. `options`: settings by name, such as
        `dtype="float32"`, `max_model_len=4096`, `kv_cache_memory="2G"`, and vLLM's arguments. `seed`: requests without
        a seed get the same seeds in each run. Raises ConfigError or CheckpointError."""
        arguments = EngineArgs(model, tokenizer=tokenizer, seed=seed, **options)
        arguments.caller = "LLM"
        self._config = arguments.prepare(_DEFAULTS)
        self.llm_engine = LLMEngine(self._config, seed=seed)
        self._engine = self.llm_engine.inline

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs) -> Self:
        """Raises ConfigError or CheckpointError."""
        args = engine_args
        return cls(args.model, tokenizer=args.tokenizer, seed=args.seed, **args.options)

    def close(self) -> None:
        """Closes the engine, which `kv_connector` and `record_trace` need. Leaving a `with` block also does it."""
        self.llm_engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def get_tokenizer(self) -> "Tokenizer":
        """The model's tokenizer."""
        return self.llm_engine.get_tokenizer()

    def get_default_sampling_params(self) -> SamplingParams:
        """The parameters that the model's authors recommend, which requests without parameters get."""
        return SamplingParams(**msgspec.structs.asdict(self._config.model.sampling))

    def get_metrics(self) -> list[Metric]:
        """Counters and gauges of the engine, with vLLM's names."""
        return self.llm_engine.get_metrics()

    def sleep(self, level: int = 1) -> None:
        """Releases the memory of weights and KV cache. `level`: vLLM's, without effect. Raises RequestError."""
        self.llm_engine.sleep(level)

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Restores the memory. `tags`: vLLM's, without effect. Raises RequestError."""
        self.llm_engine.wake_up(tags)

    # ── generation ───────────────────────────────────────────────────────────────────────────────────────────────────

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: UseTqdm = True,
        lora_request: None = None,
        priority: int | Sequence[int] | None = None,
        tokenization_kwargs: Mapping[str, object] | None = None,
    ) -> list[RequestOutput]:
        """Completes one prompt or many (text, token ids, or vLLM's dicts); the results are in their order.
        `priority`: one number for all prompts or one for each, the lowest runs first (with
        `scheduling_policy="priority"`). `tokenization_kwargs`: `add_special_tokens` and `truncate_prompt_tokens`.
        Raises RequestError if a prompt is refused."""
        _no_lora(lora_request)
        options = dict(tokenization_kwargs or {})
        adds, truncate = options.pop("add_special_tokens", True), options.pop("truncate_prompt_tokens", None)
        if options:
            raise ValueError(f"tokenization_kwargs: {min(options)} is not there.")
        parsed = [parse(prompt, add_special_tokens=bool(adds)) for prompt in as_list(prompts)]
        params = self._params(sampling_params, len(parsed))
        if truncate is not None:
            params = [replace(one, truncate_prompt_tokens=cast("int", truncate)) for one in params]
        return self._run(parsed, params, priority, use_tqdm)

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: UseTqdm = True,
        lora_request: None = None,
        *,
        chat_template: str | None = None,
        chat_template_content_format: str = "auto",
        tools: Sequence[Mapping[str, object]] | None = None,
        chat_template_kwargs: Mapping[str, object] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        priority: int | Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Answers one conversation or many, rendered by the model's chat template or by `chat_template`; otherwise as
        `generate`. `chat_template_content_format`: vLLM's, without effect."""
        _no_lora(lora_request)
        one = len(messages) > 0 and isinstance(messages[0], Mapping)
        many = cast("Sequence[Conversation]", [messages] if one else messages)
        variables = {**(self._config.default_chat_template_kwargs or {}), **(chat_template_kwargs or {})}
        wire = [
            chat_prompt(
                conversation, tools, variables, add_generation_prompt, continue_final_message, chat_template or ""
            )
            for conversation in many
        ]
        parsed = [_Wire(prompt, None, "") for prompt in wire]
        return self._run(parsed, self._params(sampling_params, len(wire)), priority, use_tqdm)

    def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: BeamSearchParams,
        lora_request: None = None,
        use_tqdm: UseTqdm = False,
    ) -> list[BeamSearchOutput]:
        """The `beam_width` best outputs of each prompt. Raises RequestError if a prompt is refused, ValueError."""
        _no_lora(lora_request)
        tokenizer = self.get_tokenizer()
        results = []
        for prompt in as_list(prompts):
            wire = parse(prompt).wire
            ids = [*bytes_to_ids(wire.ids)] if isinstance(wire, IdsPrompt) else tokenizer.encode(wire.text, True)
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

    # ── vectors and scores ───────────────────────────────────────────────────────────────────────────────────────────

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        pooling_params: PoolingParams | None = None,
        dimensions: int | None = None,
        truncate_prompt_tokens: int | None = None,
        use_tqdm: UseTqdm = True,
    ) -> list[EmbeddingRequestOutput]:
        """One vector for each prompt, pooled as the model's configuration says. `dimensions`: shortens the vectors.
        `truncate_prompt_tokens`: cuts off the end of longer prompts. Raises RequestError if a prompt is refused."""
        purpose = self._config.model.purpose
        given = pooling_params or PoolingParams(dimensions=dimensions, truncate_prompt_tokens=truncate_prompt_tokens)
        pooling = replace(given, task="embed").pooling(purpose)
        default = purpose.prompts.get(purpose.default_prompt or "", "")
        return [*map(embedding, self._pool(_plain_prompts(prompts, default), pooling, "embedding", use_tqdm))]

    def encode(
        self,
        prompts: Prompt | Sequence[Prompt],
        pooling_params: PoolingParams | None = None,
        *,
        pooling_task: str = "token_embed",
        truncate_prompt_tokens: int | None = None,
        use_tqdm: UseTqdm = True,
    ) -> list[PoolingRequestOutput]:
        """The last hidden state of each token of each prompt, or what `pooling_task` names: embed, classify, score.
        Raises RequestError if a prompt is refused."""
        given = pooling_params or PoolingParams(truncate_prompt_tokens=truncate_prompt_tokens)
        pooling = replace(given, task=given.task or pooling_task).pooling(self._config.model.purpose)
        size = self._config.model.purpose.size
        chunks = self._pool(_plain_prompts(prompts), pooling, "encoding", use_tqdm)
        return [plain(chunk, pooling.how, size) for chunk in chunks]

    def classify(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        pooling_params: PoolingParams | None = None,
        use_tqdm: UseTqdm = True,
    ) -> list[ClassificationRequestOutput]:
        """The probabilities of the labels for each prompt, by the model's classification head. Raises RequestError if
        the model has none, or a prompt is refused."""
        pooling = replace(pooling_params or PoolingParams(), task="classify").pooling(self._config.model.purpose)
        return [*map(classification, self._pool(_plain_prompts(prompts), pooling, "classifying", use_tqdm))]

    def score(
        self,
        text_1: str | Sequence[str],
        text_2: str | Sequence[str],
        *,
        truncate_prompt_tokens: int | None = None,
        use_tqdm: UseTqdm = True,
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
        self, prompts: Sequence[TextPrompt | IdsPrompt | PairPrompt], pooling: Pooling, doing: str, use_tqdm: UseTqdm
    ) -> list[Chunk]:
        """The vectors, in the order of the prompts."""
        requests = [self.llm_engine.pooling_request(f"{_OWN}{i}", prompt, pooling) for i, prompt in enumerate(prompts)]
        self._work(requests, doing, use_tqdm)
        return [request.vector for request in requests if request.vector is not None]

    # ── running ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def _params(self, given: SamplingParams | Sequence[SamplingParams] | None, num: int) -> Sequence[SamplingParams]:
        if given is None or isinstance(given, SamplingParams):
            return [given or self.get_default_sampling_params()] * num
        return given

    def _run(
        self,
        prompts: Sequence["Parsed | _Wire"],
        params: Sequence[SamplingParams],
        priority: int | Sequence[int] | None,
        use_tqdm: UseTqdm,
    ) -> list[RequestOutput]:
        if len(params) != len(prompts):
            raise ValueError(f"{len(prompts)} prompts but {len(params)} sampling_params")
        ranks = [priority or 0] * len(prompts) if priority is None or isinstance(priority, int) else priority
        if len(ranks) != len(prompts):
            raise ValueError(f"{len(prompts)} prompts but {len(ranks)} priorities")
        requests, results = [], []
        for i, (prompt, one, rank) in enumerate(zip(prompts, params, ranks, strict=True)):
            request = self.llm_engine.request(f"{_OWN}{i}", prompt.wire, prompt.text, one, rank, prompt.cache_salt)
            assert request.result is not None, request
            request.result.request_id = str(i)
            requests.append(request)
            results.append(request.result)
        self._work(requests, "generating", use_tqdm)
        return results

    def _work(self, requests: Sequence[Request], doing: str, use_tqdm: UseTqdm) -> None:
        """Runs the engine until all have ended. If one is refused, cancels the others and raises RequestError."""
        from tqdm import tqdm

        show = use_tqdm if callable(use_tqdm) else tqdm
        num = sum(request.submit.n for request in requests)
        with show(total=num, desc=doing, unit="output", disable=use_tqdm is False, file=sys.stderr) as bar:
            for request in requests:
                request.on_end = bar.update
                self.llm_engine.add(request)
            self.llm_engine.run(requests)


_OWN = "\0"  # begins the ids of our own requests, which no caller's does


class _Wire(NamedTuple):
    """A rendered conversation in the place of a `Parsed`."""

    wire: ChatPrompt
    text: None
    cache_salt: str


def _no_lora(lora_request: object) -> None:
    if lora_request is not None:
        raise ValueError("lora_request is not there: give the adapter's folder as the model.")


def _plain_prompts(prompts: Prompt | Sequence[Prompt], prefix: str = "") -> list[TextPrompt | IdsPrompt]:
    """`prefix`: put before each text."""
    return [parse(prompt, prefix=prefix).wire for prompt in as_list(prompts)]


def chat_prompt(
    messages: Conversation,
    tools: Sequence[Mapping[str, object]] | None,
    chat_template_kwargs: Mapping[str, object] | None,
    add_generation_prompt: bool,
    continue_final_message: bool,
    template: str = "",
) -> ChatPrompt:
    encode = msgspec.json.encode
    return ChatPrompt(
        encode(messages),
        encode(tools) if tools else b"",
        encode(chat_template_kwargs) if chat_template_kwargs else b"",
        add_generation_prompt,
        continue_final_message,
        template,
    )
