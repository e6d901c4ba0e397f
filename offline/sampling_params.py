"""Parameters of the offline APIs: sampling, stop conditions and structured outputs."""

import json
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from enum import Enum

import msgspec

from ..ipc.messages import ChatPrompt, Constraint, IdsPrompt, Limits, Sampling, Submit, TextPrompt, TextSpec


@dataclass(frozen=True, kw_only=True)
class StructuredOutputsParams:
    """The constraint of an output: set exactly one field. docs/structured-outputs.md has the rules."""

    json: str | Mapping[str, object] | None = None  # a JSON schema
    json_object: bool | None = None
    regex: str | None = None  # of the whole output
    choice: Sequence[str] | None = None
    grammar: str | None = None  # Lark, or llama.cpp's GBNF
    disable_any_whitespace: bool = False  # this and the next three are vLLM's and refused if they are set
    disable_additional_properties: bool = False
    whitespace_pattern: str | None = None
    structural_tag: str | None = None


class RequestOutputKind(Enum):
    """What each step of `LLMEngine` and `AsyncLLMEngine` returns of an open request."""

    CUMULATIVE = 0  # all output so far
    DELTA = 1  # what is new
    FINAL_ONLY = 2  # nothing before the end


@dataclass(kw_only=True)
class SamplingParams:
    """How outputs are sampled and when they end. Bounds are checked when a request is made, and so are parameters of
    vLLM that are not there."""

    n: int = 1  # outputs per prompt
    temperature: float = 1.0  # 0: greedy
    top_p: float = 1.0
    top_k: int = 0  # 0 or -1: off
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = None
    seed: int | None = None  # None: a random one for each request
    max_tokens: int | None = 16  # None: to the end of the context
    min_tokens: int = 0  # before that many, eos, stop tokens and stop strings do not end an output
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    ignore_eos: bool = False
    allowed_token_ids: Sequence[int] | None = None  # no other token is sampled
    bad_words: Sequence[str] | None = None  # texts that no output contains
    structured_outputs: StructuredOutputsParams | None = None
    truncate_prompt_tokens: int | None = None  # keep the last n tokens of the prompt; -1: as many as fit
    logprobs: int | None = None  # number of candidates to return for each token
    prompt_logprobs: int | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    thinking_token_budget: int | None = None  # tokens of reasoning in a chat; -1: no bound
    # vLLM's, without effect on an answer here:
    spaces_between_special_tokens: bool = True
    stream_interval: int | None = None
    skip_clone: bool = False
    routed_experts_prompt_start: int = 0
    watermarking: bool | None = None  # nothing is marked
    extra_args: Mapping[str, object] | None = None  # for the runner plugin; ignored without one
    # vLLM's, refused if they are set:
    logits_processors: Sequence[object] | None = None
    logprob_token_ids: Sequence[int] | None = None
    prompt_logprob_token_ids: Sequence[Sequence[int]] | None = None
    prompt_logprob_start: int | None = None
    flat_logprobs: bool = False
    repetition_detection: object | None = None
    trace_decode_token_ids: Sequence[int] | None = None
    skip_reading_prefix_cache: bool | None = None

    def clone(self) -> "SamplingParams":
        """A copy."""
        return replace(self)

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0


_REFUSED = {
    "logits_processors": "no functions of the caller run in the worker; runner_plugin=… names a plugin that does, "
    "and logit_bias, allowed_token_ids, bad_words and structured_outputs change what is sampled",
    "logprob_token_ids": "log-probabilities are those of the most likely tokens: use logprobs",
    "prompt_logprob_token_ids": "log-probabilities are those of the most likely tokens: use prompt_logprobs",
    "prompt_logprob_start": "prompt_logprobs are those of the whole prompt",
    "flat_logprobs": "log-probabilities are a dict for each position",
    "repetition_detection": "an output ends by stop, max_tokens or its structure; penalties avoid repetition",
    "trace_decode_token_ids": "outputs are sampled; prompt_logprobs score given tokens",
    "skip_reading_prefix_cache": "give the prompt a cache_salt of its own",
}
_REFUSED_STRUCTURE = {
    "disable_any_whitespace": "the grammar allows what JSON allows",
    "disable_additional_properties": "write additionalProperties: false into the schema",
    "whitespace_pattern": "the grammar allows what JSON allows",
    "structural_tag": "describe the text by a grammar",
}


def _refuse(params: object, refused: Mapping[str, str]) -> None:
    """Raises ValueError if a parameter is set that is not there."""
    for field in fields(params):  # type: ignore[arg-type]  # of one of the two dataclasses
        if field.name in refused and getattr(params, field.name) not in (field.default, False, [], ()):
            raise ValueError(f"{type(params).__name__}: {field.name} is not there: {refused[field.name]}.")


def submit(
    rid: int,
    prompt: TextPrompt | ChatPrompt | IdsPrompt,
    params: SamplingParams,
    priority: int,
    reasoning: tuple[str, ...],
    cache_salt: str = "",
) -> Submit:
    """The message for the engine. `reasoning`: the tags that begin and end the model's reasoning; in a chat, the
    constraint applies after it. Raises ValueError naming the parameter that is out of bounds."""
    _refuse(params, _REFUSED)
    reasoning = reasoning if isinstance(prompt, ChatPrompt) else ()
    stop = (params.stop,) if isinstance(params.stop, str) else tuple(params.stop or ())
    wire = Submit(
        rid,
        params.n,
        prompt,
        Sampling(
            temperature=params.temperature,
            top_k=max(0, params.top_k),
            top_p=params.top_p,
            min_p=params.min_p,
            repetition_penalty=params.repetition_penalty,
            presence_penalty=params.presence_penalty,
            frequency_penalty=params.frequency_penalty,
            logit_bias=dict(params.logit_bias) if params.logit_bias else None,
            seed=secrets.randbits(62) if params.seed is None else params.seed,
            logprobs=params.logprobs,
            prompt_logprobs=params.prompt_logprobs,
            allowed_token_ids=tuple(params.allowed_token_ids or ()),
            extra_args=_extra_args(params.extra_args),
        ),
        Limits(params.max_tokens, tuple(params.stop_token_ids or ()), params.ignore_eos, min_tokens=params.min_tokens),
        TextSpec(
            stop=stop,
            include_stop=params.include_stop_str_in_output,
            skip_special_tokens=params.skip_special_tokens,
            detokenize=params.detokenize,
            prompt=True,
            min_tokens=params.min_tokens,
        ),
        priority,
        truncate=params.truncate_prompt_tokens,
        constraint=_constraint(params, reasoning),
        cache_salt=cache_salt,
        bad_words=tuple(params.bad_words or ()),
    )
    try:
        return checked(wire)
    except ValueError as error:
        raise ValueError(f"SamplingParams: {error}") from error


def _extra_args(args: Mapping[str, object] | None) -> bytes:
    """As JSON; equal arguments have equal bytes."""
    try:
        return msgspec.json.encode(args, order="sorted") if args else b""
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"SamplingParams: extra_args must be JSON: {error}") from error


def _constraint(params: SamplingParams, reasoning: tuple[str, ...]) -> Constraint | None:
    budget = params.thinking_token_budget
    budget = None if budget == -1 else budget
    if budget is not None and not reasoning:
        raise ValueError("SamplingParams: thinking_token_budget is for chats with a model whose reasoning is known.")
    wanted = params.structured_outputs
    if wanted is None and budget is None:
        return None
    constraint = Constraint(reasoning_starts=reasoning[:1], reasoning_ends=reasoning[1:], thinking_budget=budget)
    return constraint if wanted is None else _structure(wanted, constraint)


def _structure(params: StructuredOutputsParams, constraint: Constraint) -> Constraint:
    _refuse(params, _REFUSED_STRUCTURE)
    given = [
        name
        for name in ("json", "json_object", "regex", "choice", "grammar")
        if getattr(params, name) not in (None, False)
    ]
    if len(given) != 1:
        raise ValueError("StructuredOutputsParams: give one of json, json_object, regex, choice and grammar.")
    replace = msgspec.structs.replace
    if params.json is not None or params.json_object:
        schema = {"type": "object"} if params.json is None else params.json
        text = schema if isinstance(schema, str) else json.dumps(schema)
        return replace(constraint, kind="json_schema", text=text)
    if params.choice is not None:
        return replace(constraint, kind="choice", text=json.dumps(list(params.choice)))
    if params.regex is not None:
        return replace(constraint, kind="regex", text=params.regex)
    assert params.grammar is not None
    return replace(constraint, kind="lark", text=params.grammar)


def checked(wire: Submit) -> Submit:
    """Returns `wire`. Raises ValueError if a field is out of bounds."""
    try:
        return msgspec.convert(msgspec.to_builtins(wire), Submit)
    except msgspec.ValidationError as error:
        raise ValueError(_complaint(str(error))) from error


def _complaint(text: str) -> str:
    """msgspec's message with the parameter's name in place of its position, such as `$[3][0]`."""
    what, _, place = text.partition(" - at `$")
    names: tuple[str, ...] = ("its tag", *Submit.__struct_fields__)
    for index in re.findall(r"\[(\d+)\]", place)[:2]:
        name = names[int(index)]
        parts: dict[str, tuple[str, ...]] = {"sampling": Sampling.__struct_fields__, "limits": Limits.__struct_fields__}
        if name not in parts:
            return f"{name}: {what}"
        names = parts[name]
    return what
