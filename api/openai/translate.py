"""Translates chat and completion requests into `Submit` messages, or refuses them with a clear 400.

Owns every rule that concerns more than one field. The gateway assigns the rids.
"""

import hashlib
import secrets
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TypeVar

import msgspec
from msgspec.structs import replace

from ...config.config import EngineConfig, Infill, SamplingDefaults
from ...ipc.messages import (
    MAX_EXTRA_BYTES,
    ChatPrompt,
    Constraint,
    IdsPrompt,
    Limits,
    Sampling,
    Submit,
    TextPrompt,
    TextSpec,
    ids_to_bytes,
)
from ..gateway.journal import entries
from ..http.http_error import HttpError, unsupported
from ..output.parsers.lexer import Grammar
from ..output.parsers.registry import find_grammar
from ..output.shapes import Bias, GenerationRequest, TokenId
from ..output.turn import Turn
from .constraints import chat_constraint, completion_constraint
from .infill import infill_prompt
from .types import ChatRequest, CompletionRequest, Message, Tool

T = TypeVar("T")

DEFAULT_COMPLETION_TOKENS = 16
MAX_PROMPTS = 256
MAX_SEQUENCES = 4096  # of one request: prompts times n
_GREEDY_BELOW = 1e-5  # a temperature whose inverse overflows or loses all precision in floats
_MAX_COMPLAINT = 200  # characters of an error message; msgspec quotes a value that is not allowed
_SEEDS = 2**63 - 2**16  # leaves room for the seeds `seed + i` of n sequences

_NEED_CONTENT = ("system", "developer", "user")
_THINKING = ("enable_thinking", "thinking")  # Qwen's, GLM's and others'; DeepSeek's and Granite's
_REFUSED = (
    "logits_processors", "prompt_embeds", "guided_decoding_backend", "audio",
    "web_search_options", "ec_transfer_params", "bootstrap_host", "bootstrap_port", "bootstrap_room",
    "logprob_token_ids", "repetition_detection", "return_prompt_text", "return_token_offsets",
    "watermarking",
)  # fmt: skip

_messages_decoder = msgspec.json.Decoder(list[Message])
_tools_decoder = msgspec.json.Decoder(list[Tool])


def request_decoder(type: type[T]) -> "msgspec.json.Decoder[T]":
    """A decoder of requests. Numbers and booleans may be written as strings, as other servers allow."""
    return msgspec.json.Decoder(type, strict=False)


def decode_body(decoder: "msgspec.json.Decoder[T]", body: bytes) -> T:
    """Decodes a request. Raises HttpError 400, which names the field."""
    try:
        text = body.decode()  # msgspec does not check fields that it skips
    except UnicodeDecodeError:
        raise HttpError(400, "The body is not UTF-8.", code="invalid_json") from None
    try:
        return decode_part(lambda: decoder.decode(text), "")
    except HttpError as error:
        if (error.param or "").startswith("logit_bias"):
            raise _with_key(error, text) from None
        raise


def _with_key(error: HttpError, text: str) -> HttpError:
    """An error about `logit_bias` that names the entry, which the decoder does not do."""
    biases = msgspec.json.decode(text, type=dict[str, object])["logit_bias"]
    for key, value in biases.items() if isinstance(biases, dict) else ():
        try:
            msgspec.convert({key: value}, dict[TokenId, Bias], strict=False)
        except msgspec.ValidationError:
            return HttpError(400, f"{error} The entry is {key[:40]!r}.", param="logit_bias")
    return error


def chat_submits(request: ChatRequest, config: EngineConfig, salt: bytes) -> list[Submit]:
    """The submits of a chat request: one, or one for each choice that is resumed. Raises HttpError."""
    _check_common(request, config)
    messages = decode_part(lambda: _messages_decoder.decode(request.messages), "messages")
    if not messages:
        raise HttpError(400, "messages must not be empty.", param="messages")
    for i, message in enumerate(messages):
        if message.content is None and message.role in _NEED_CONTENT:
            raise HttpError(400, f"messages[{i}] has no content.", param=f"messages[{i}].content")
        for part in message.content if isinstance(message.content, list) else ():
            if not isinstance(part, str) and part.type not in ("text", "refusal"):
                detail = f"This model takes text only; a content part of type {part.type[:40]!r} was sent."
                raise unsupported("messages", detail)
    tools = _check_chat(request)
    if request.chat_template is not None and not config.trust_request_chat_template:
        detail = "chat_template in a request needs a server that was started with --trust-request-chat-template."
        raise unsupported("chat_template", detail)
    goes_on = bool(request.continue_final_message)
    add_generation_prompt = request.add_generation_prompt if request.add_generation_prompt is not None else not goes_on
    if goes_on and add_generation_prompt:
        detail = "continue_final_message and add_generation_prompt cannot both be true."
        raise HttpError(400, detail, param="continue_final_message")
    variables = dict(request.chat_template_kwargs or {})
    if request.documents is not None:
        variables["documents"] = request.documents
    for name in ("reasoning_effort", "verbosity"):
        if (value := getattr(request, name)) is not None:
            variables.setdefault(name, value)
    if request.reasoning_effort == "none":
        set_thinking(variables, False)
    _set_defaults(variables, config.default_chat_template_kwargs or {})
    prompt = ChatPrompt(
        messages=_with_system(bytes(request.messages), messages, config.system_prompt),
        tools=bytes(request.tools) if shows_tools(request) else b"",
        template_kwargs=msgspec.json.encode(variables) if variables else b"",
        add_generation_prompt=add_generation_prompt,
        continue_final_message=goes_on,
        template=request.chat_template or "",
        add_special_tokens=bool(request.add_special_tokens),
    )
    max_tokens = request.max_completion_tokens if request.max_completion_tokens is not None else request.max_tokens
    if max_tokens == 0:
        raise HttpError(400, "max_tokens must be at least 1.", param="max_tokens")
    logprobs = (request.top_logprobs or 0) if request.logprobs else None
    submits = _submits(
        request,
        [prompt],
        n=request.n or 1,
        max_tokens=max_tokens,
        logprobs=logprobs,
        salt=salt,
        defaults=config.model.sampling,
        grammar=output_grammar(request, config),
        constraint=chat_constraint(request, tools, config),
    )
    return _resumed(request, submits, config.model.vocab_size)


def _with_system(encoded: bytes, messages: Sequence[Message], system_prompt: str) -> bytes:
    """The conversation, which begins with the operator's system prompt if it has none of its own. `encoded`: the
    messages as JSON."""
    if not system_prompt or any(message.role in ("system", "developer") for message in messages):
        return encoded
    first = msgspec.json.encode({"role": "system", "content": system_prompt})
    return b"[%s,%s" % (first, encoded[encoded.index(b"[") + 1 :])


def set_thinking(variables: dict[str, object], is_on: bool) -> None:
    """Sets the variables with which chat templates switch a model's reasoning on and off, unless the client has set one
    of them itself. A template reads one of them at most and ignores the others."""
    if not any(name in variables for name in _THINKING):
        variables.update(dict.fromkeys(_THINKING, is_on))


def _set_defaults(variables: dict[str, object], defaults: Mapping[str, object]) -> None:
    """Adds the operator's values of variables that the request has not set."""
    has_thinking = any(name in variables for name in _THINKING)
    for name, value in defaults.items():
        if name not in _THINKING or not has_thinking:
            variables.setdefault(name, value)


def chat_prompt(request: ChatRequest, config: EngineConfig) -> ChatPrompt:
    """The prompt of a chat request. Raises HttpError."""
    prompt = chat_submits(request, config, b"")[0].prompt
    assert isinstance(prompt, ChatPrompt), prompt
    return prompt


def read_turn(request: ChatRequest, config: EngineConfig, custom: frozenset[str] = frozenset()) -> Turn:
    """The reader of one output of a chat request. `custom`: see `Turn`."""
    grammar = output_grammar(request, config)
    return Turn(
        grammar,
        parallel_tool_calls=request.parallel_tool_calls is not False,
        include_reasoning=request.include_reasoning is not False,
        must_call=forces_call(request),
        custom=custom,
    )


def output_grammar(request: ChatRequest, config: EngineConfig) -> Grammar | None:
    """What to read the output with; None if all of it is text."""
    grammar = find_grammar(config.tool_call_parser, config.reasoning_parser, shows_tools(request))
    if grammar is None or not grammar.needs_schemas:
        return grammar
    return grammar._replace(schemas={tool.function.name: tool.function.parameters for tool in _tools(request)})


def final_words(request: ChatRequest) -> str:
    """With `echo`, the text of the final message if it is the assistant's. Raises HttpError."""
    if not request.echo:
        return ""
    final = decode_part(lambda: _messages_decoder.decode(request.messages), "messages")[-1]
    if final.role != "assistant" or final.content is None:
        return ""
    parts = [final.content] if isinstance(final.content, str) else final.content
    return "".join(part if isinstance(part, str) else part.text or part.refusal or "" for part in parts)


def forces_call(request: ChatRequest) -> bool:
    """Whether the output must be calls."""
    return request.tool_choice not in (None, "none", "auto")


def shows_tools(request: ChatRequest) -> bool:
    """Whether the prompt has the tools, and calls are read from the output."""
    return _sends_tools(request) and request.tool_choice != "none"


def _sends_tools(request: ChatRequest) -> bool:
    return bytes(request.tools).translate(None, b" \t\r\n") not in (b"", b"null", b"[]")


def completion_submits(
    request: CompletionRequest,
    config: EngineConfig,
    salt: bytes,
    *,
    default_tokens: int | None = DEFAULT_COMPLETION_TOKENS,
) -> list[Submit]:
    """The submits of a completion request in the order of its prompts, or one for each choice that is resumed.
    `default_tokens`: the longest output without `max_tokens`, None: as many as fit. Raises HttpError."""
    if request.suffix:
        request = _infilled(request, config.model.infill)
    _check_common(request, config)
    best_of = num_candidates(request)
    if best_of < (request.n or 1):
        raise HttpError(400, "best_of must not be less than n.", param="best_of")
    if best_of > (request.n or 1) and request.stream:
        raise HttpError(400, "best_of cannot be streamed unless it is n.", param="best_of")
    prompts = _prompts(request)
    if len(prompts) * best_of > MAX_SEQUENCES:
        field = "n" if request.best_of is None else "best_of"
        raise HttpError(400, f"prompts times {field} must be at most {MAX_SEQUENCES}.", param=field)
    max_tokens = default_tokens if request.max_tokens is None else request.max_tokens
    if max_tokens == 0 and not request.echo:
        raise HttpError(400, "max_tokens must be at least 1 unless echo is true.", param="max_tokens")
    ranks = best_of > (request.n or 1)  # by log-probability
    submits = _submits(
        request,
        prompts,
        n=best_of,
        max_tokens=max_tokens,
        logprobs=0 if ranks and request.logprobs is None else request.logprobs,
        prompt_logprobs=max(request.logprobs, request.prompt_logprobs or 0)
        if request.echo and request.logprobs is not None
        else None,
        shows_prompt=bool(request.echo),
        salt=salt,
        defaults=config.model.sampling,
        constraint=completion_constraint(request),
    )
    return _resumed(request, submits, config.model.vocab_size)


def num_candidates(request: CompletionRequest) -> int:
    """The number of outputs of each prompt. The best `n` of them are the answer."""
    return request.best_of or request.n or 1


def _prompts(request: CompletionRequest) -> list[TextPrompt | IdsPrompt]:
    prompt = request.prompt
    add_special_tokens = request.add_special_tokens is not False
    if isinstance(prompt, str):
        return [TextPrompt(prompt, add_special_tokens)]
    texts = [part for part in prompt if isinstance(part, str)]
    ids = [part for part in prompt if isinstance(part, int)]
    lists = [part for part in prompt if isinstance(part, list)]
    if len(prompt) not in (len(texts), len(ids), len(lists)) or not prompt or not all(lists):
        detail = "prompt must be a string, a list of strings, a list of token ids or a list of those, and not empty."
        raise HttpError(400, detail, param="prompt")
    if ids:
        return [IdsPrompt(ids_to_bytes(ids))]
    if len(prompt) > MAX_PROMPTS:
        raise HttpError(400, f"At most {MAX_PROMPTS} prompts can be sent at once.", param="prompt")
    if texts:
        return [TextPrompt(text, add_special_tokens) for text in texts]
    return [IdsPrompt(ids_to_bytes(part)) for part in lists]


def _infilled(request: CompletionRequest, infill: Infill | None) -> CompletionRequest:
    """The request for what belongs between its prompts and its suffix."""
    texts = [request.prompt] if isinstance(request.prompt, str) else request.prompt
    if not all(isinstance(text, str) for text in texts):
        raise HttpError(400, "suffix is for prompts of text; token ids were sent.", param="suffix")
    if request.echo:
        raise HttpError(400, "suffix and echo cannot both be given.", param="suffix")
    prompts = [infill_prompt(infill, str(text), request.suffix or "", field="suffix") for text in texts]
    stops = [*(request.stop_token_ids or ()), *(infill.stop_ids if infill is not None else ())]
    return replace(request, prompt=prompts, suffix=None, stop_token_ids=stops)


def _resumed(request: ChatRequest | CompletionRequest, submits: list[Submit], vocab_size: int) -> list[Submit]:
    """With `resume_token_ids`, a submit for each choice, which begins with the tokens that another engine sampled."""
    token_ids, name = request.resume_token_ids, "resume_token_ids"
    if token_ids is None:
        return submits
    if request.use_beam_search or (
        isinstance(request, CompletionRequest) and num_candidates(request) > (request.n or 1)
    ):
        raise HttpError(400, f"{name} cannot be combined with use_beam_search or best_of.", param=name)
    choices = entries(submits)
    if len(token_ids) != len(choices):
        detail = f"{name} must have a list for each of the {len(choices)} choices, but has {len(token_ids)}."
        raise HttpError(400, detail, param=name)
    longest = max(token_ids, key=len)
    if submits[0].limits.max_tokens is not None and len(longest) > submits[0].limits.max_tokens:
        raise HttpError(400, f"{name} has {len(longest)} tokens for a choice, more than max_tokens.", param=name)
    for ids in token_ids:
        _check_ids(name, ids, vocab_size)
    return [
        replace(choice.submit, resume_ids=ids_to_bytes(ids), resume_chars=-1 if ids else 0)
        for choice, ids in zip(choices, token_ids, strict=True)
    ]


def _or(value: T | None, default: T) -> T:
    return default if value is None else value


def _submits(
    request: GenerationRequest,
    prompts: Sequence[TextPrompt | ChatPrompt | IdsPrompt],
    *,
    n: int,
    max_tokens: int | None,
    logprobs: int | None,
    salt: bytes,
    defaults: SamplingDefaults,
    prompt_logprobs: int | None = None,
    shows_prompt: bool = False,
    grammar: Grammar | None = None,
    constraint: Constraint | None = None,
) -> list[Submit]:
    if request.min_tokens and max_tokens is not None and request.min_tokens > max_tokens:
        raise HttpError(400, f"min_tokens must be at most max_tokens, which is {max_tokens}.", param="min_tokens")
    temperature = _or(request.temperature, defaults.temperature)
    sampling = Sampling(
        temperature=0.0 if temperature < _GREEDY_BELOW else temperature,
        top_k=max(_or(request.top_k, defaults.top_k), 0),
        top_p=_or(request.top_p, defaults.top_p),
        min_p=_or(request.min_p, defaults.min_p),
        repetition_penalty=_or(request.repetition_penalty, defaults.repetition_penalty),
        presence_penalty=request.presence_penalty or 0.0,
        frequency_penalty=request.frequency_penalty or 0.0,
        logit_bias=request.logit_bias or None,
        logprobs=logprobs,
        prompt_logprobs=request.prompt_logprobs if prompt_logprobs is None else prompt_logprobs,
        allowed_token_ids=tuple(request.allowed_token_ids or ()),
        extra_args=_extra_args(request.vllm_xargs),
    )
    limits = Limits(
        max_tokens=max_tokens,
        stop_token_ids=tuple(request.stop_token_ids or ()),
        ignore_eos=bool(request.ignore_eos),
        queue_timeout_s=request.timeout,
        min_tokens=request.min_tokens or 0,
    )
    stop = (request.stop,) if isinstance(request.stop, str) else tuple(request.stop or ())
    text = TextSpec(
        stop=stop,
        include_stop=bool(request.include_stop_str_in_output),
        skip_special_tokens=request.skip_special_tokens is not False,
        detokenize=request.detokenize is not False,
        prompt=shows_prompt or bool(request.return_token_ids) or request.prompt_logprobs is not None,
        marks=() if grammar is None else grammar.all_marks,
        prompt_end=grammar is not None,
        min_tokens=limits.min_tokens,
    )
    tenant = salt.hex() or request.user or ""  # with a key the tenant is its owner, whatever `user` says
    if request.cache_salt is not None:
        salt = hashlib.sha256(salt + b"/" + request.cache_salt.encode()).digest()[:16]
    return [
        Submit(
            rid=0,
            n=n,
            prompt=prompt,
            # Prompts of one batch may be equal, so only a requested seed is the same for all of them.
            sampling=replace(sampling, seed=secrets.randbits(62) if request.seed is None else request.seed % _SEEDS),
            limits=limits,
            text=text,
            priority=request.priority or 0,
            tenant=tenant,
            salt=salt,
            truncate=request.truncate_prompt_tokens,
            keeps_start=request.truncation_side == "right",
            constraint=constraint,
            bad_words=tuple(request.bad_words or ()),
            cache_salt=request.cache_salt or "",
            latency_class=request.service_tier or "",
        )
        for prompt in prompts
    ]


def _extra_args(args: dict[str, object] | None) -> bytes:
    """The arguments for the runner plugin; equal ones have equal bytes."""
    found = msgspec.json.encode(args, order="sorted") if args else b""
    if len(found) > MAX_EXTRA_BYTES:
        detail = f"vllm_xargs has {len(found)} bytes of JSON; at most {MAX_EXTRA_BYTES} are taken."
        raise HttpError(400, detail, param="vllm_xargs")
    return found


def _check_common(request: GenerationRequest, config: EngineConfig) -> None:
    for name in _REFUSED:
        if getattr(request, name, None):
            raise unsupported(name)
    if request.vllm_xargs and config.runner_plugin is None:
        raise unsupported("vllm_xargs", "vllm_xargs is for a runner plugin, and this server has none.")
    if request.stream_options is not None and not request.stream:
        raise HttpError(400, "stream_options is only allowed when stream is true.", param="stream_options")
    if request.prompt_logprobs is not None and request.stream:
        raise HttpError(400, "prompt_logprobs cannot be streamed.", param="prompt_logprobs")
    if request.detokenize is False and request.stop:
        raise HttpError(400, "stop needs text: detokenize must not be false.", param="stop")
    if request.truncate_prompt_tokens == 0:
        raise HttpError(400, "truncate_prompt_tokens must be -1 or at least 1.", param="truncate_prompt_tokens")
    for name, default in (("length_penalty", 1.0), ("early_stopping", False)):
        if getattr(request, name) not in (None, default) and not request.use_beam_search:
            raise HttpError(400, f"{name} is only allowed when use_beam_search is true.", param=name)
    for name in ("logit_bias", "stop_token_ids", "allowed_token_ids"):
        _check_ids(name, getattr(request, name), config.model.vocab_size)


def _check_ids(name: str, ids: Collection[int] | None, vocab_size: int) -> None:
    if ids and max(ids) >= vocab_size:
        detail = f"{name} has token id {max(ids)}, and the vocabulary ends at {vocab_size - 1}."
        raise HttpError(400, detail, param=name)


def _check_chat(request: ChatRequest) -> list[Tool]:
    """Checks the fields of chat alone, and returns the tools."""
    if request.top_logprobs and not request.logprobs:
        raise HttpError(400, "top_logprobs is only allowed when logprobs is true.", param="top_logprobs")
    if request.modalities not in (None, [], ["text"]):
        raise unsupported("modalities", 'modalities must be ["text"].')
    return _tools(request)


def _tools(request: ChatRequest) -> list[Tool]:
    return decode_part(lambda: _tools_decoder.decode(request.tools), "tools") if _sends_tools(request) else []


def decode_part(decode: Callable[[], T], within: str) -> T:
    """Runs a msgspec decoder. The place that its error names becomes `param`."""
    try:
        return decode()
    except msgspec.ValidationError as error:
        # "Expected `int`, got `str` - at `$.n`", or "… - at `key` in `$.logit_bias`"
        what = str(error).partition(" - at `")[0][:_MAX_COMPLAINT]
        place = str(error).rpartition("`$")[2].rstrip("`") if " - at `" in str(error) else ""
        param = (within + place).lstrip(".") or None
        raise HttpError(400, f"{param or 'The body'}: {what}.", param=param) from None
    except RecursionError:
        raise HttpError(400, "The body is nested too deeply.", code="invalid_json") from None
    except (msgspec.DecodeError, UnicodeDecodeError):
        raise HttpError(400, "The body is not valid JSON.", code="invalid_json") from None
