"""Parameters of the offline APIs: sampling, stop conditions and structured outputs."""

import json
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec

from ..ipc.messages import ChatPrompt, Constraint, IdsPrompt, Limits, Sampling, Submit, TextPrompt, TextSpec


@dataclass(frozen=True, kw_only=True)
class StructuredOutputsParams:
    """The constraint of an output: set exactly one field. docs/structured-outputs.md has the rules."""

    json: str | Mapping[str, object] | None = None  # a JSON schema
    json_object: bool = False
    regex: str | None = None  # of the whole output
    choice: Sequence[str] | None = None
    grammar: str | None = None  # Lark, or llama.cpp's GBNF


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How outputs are sampled and when they end. Bounds are checked when a request is made."""

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


def submit(
    rid: int,
    prompt: TextPrompt | ChatPrompt | IdsPrompt,
    params: SamplingParams,
    priority: int,
    reasoning: tuple[str, ...],
) -> Submit:
    """The message for the engine. `reasoning`: the tags that begin and end the model's reasoning; in a chat, the
    constraint applies after it. Raises ValueError naming the parameter that is out of bounds."""
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
        constraint=None if params.structured_outputs is None else _constraint(params.structured_outputs, reasoning),
        bad_words=tuple(params.bad_words or ()),
    )
    try:
        return checked(wire)
    except ValueError as error:
        raise ValueError(f"SamplingParams: {error}") from error


def _constraint(params: StructuredOutputsParams, reasoning: tuple[str, ...]) -> Constraint:
    given = [
        name for name in StructuredOutputsParams.__dataclass_fields__ if getattr(params, name) not in (None, False)
    ]
    if len(given) != 1:
        raise ValueError("StructuredOutputsParams: give one of json, json_object, regex, choice and grammar.")
    constraint = Constraint(reasoning_starts=reasoning[:1], reasoning_ends=reasoning[1:])
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
