"""Translates Ollama's requests into chat and completion requests."""

from collections.abc import Iterator
from contextlib import contextmanager

import msgspec

from ...config.config import EngineConfig
from ...errors import RequestError
from ..http.http_error import HttpError, as_http_error, unsupported
from ..llamacpp.sampling import OWN_NAMES, sampling_fields
from ..openai.conversation import Conversation
from ..openai.translate import set_thinking
from ..openai.types import ChatRequest, CompletionRequest
from ..output.parsers.registry import find_family
from ..output.shapes import JsonSchemaFormat, ResponseFormat
from .types import OllamaChatRequest, OllamaGenerateRequest, OllamaMessage, OllamaRequest, Options

_EFFORTS = ("low", "medium", "high")
_OPTIONS = ("temperature", "top_k", "top_p", "min_p", "seed", "stop", "presence_penalty", "frequency_penalty")


def chat_request(request: OllamaChatRequest, config: EngineConfig) -> ChatRequest:
    """A conversation as a chat request. Raises HttpError."""
    conversation, calls = Conversation(), _Calls()
    for i, message in enumerate(request.messages or ()):
        _add(conversation, calls, message, f"messages[{i}]")
    return _chat(request, conversation, config, request.tools)


def prompt_request(request: OllamaGenerateRequest, config: EngineConfig) -> ChatRequest:
    """A prompt as a chat request with one question. Raises HttpError."""
    conversation = Conversation()
    if request.system:
        conversation.add_text("system", [request.system])
    conversation.add_text("user", [request.prompt or ""])
    return _chat(request, conversation, config, None)


def check_generate(request: OllamaGenerateRequest) -> None:
    """Refuses what generate cannot take. Raises HttpError."""
    if request.images:
        raise _no_images("images")
    for name in ("context", "template"):
        if getattr(request, name):
            raise unsupported(name)


def text_request(request: OllamaGenerateRequest) -> CompletionRequest:
    """A raw prompt, or one with a suffix, as a completion request. Raises HttpError."""
    options = request.options or Options()
    return CompletionRequest(
        **sampling_fields(options, options.num_predict, "options."),  # type: ignore[arg-type]  # checked by `Options`
        prompt=request.prompt or "",
        suffix=request.suffix,
        logprobs=(request.top_logprobs or 0) if request.logprobs else None,
        response_format=_response_format(request),
    )


@contextmanager
def in_terms_of_ollama() -> Iterator[None]:
    """Rewrites errors of chat, completions and the engine, with this API's names of fields."""
    try:
        yield
    except (HttpError, RequestError) as error:
        raise as_http_error(error).with_name(_own_name) from None


def _own_name(param: str) -> str:
    if param.startswith("response_format"):
        return "format"
    name = OWN_NAMES.get(param, param)
    return f"options.{name}" if name != param or param in _OPTIONS else param


def _chat(
    request: OllamaRequest, conversation: Conversation, config: EngineConfig, tools: list[dict[str, object]] | None
) -> ChatRequest:
    options = request.options or Options()
    variables: dict[str, object] = {}
    if request.think is not None:
        _check_think(request.think, config)
        set_thinking(variables, request.think is not False)
    is_effort = isinstance(request.think, str)
    goes_on = conversation.last_role == "assistant" and not conversation.ends_with_call
    return ChatRequest(
        **sampling_fields(options, options.num_predict, "options."),  # type: ignore[arg-type]  # checked by `Options`
        messages=msgspec.Raw(conversation.json()),
        tools=msgspec.Raw(msgspec.json.encode([{"type": "function"} | tool for tool in tools or ()])),
        response_format=_response_format(request),
        reasoning_effort=str(request.think) if is_effort else None,
        chat_template_kwargs=variables,
        logprobs=request.logprobs,
        top_logprobs=request.top_logprobs if request.logprobs else None,
        add_generation_prompt=not goes_on,
        continue_final_message=goes_on,
    )


def _check_think(think: bool | str, config: EngineConfig) -> None:
    if isinstance(think, str) and think not in _EFFORTS:
        raise HttpError(400, f"think must be true, false or one of {', '.join(_EFFORTS)}.", param="think")
    family = find_family(config.tool_call_parser, config.reasoning_parser)
    if think and family.reasoning is None:
        raise unsupported("think", f"{config.served_model_names[0]!r} does not support thinking.")


def _response_format(request: OllamaRequest) -> ResponseFormat | None:
    if not request.format:
        return None
    if isinstance(request.format, dict):
        return ResponseFormat("json_schema", JsonSchemaFormat(request.format))
    if request.format != "json":
        raise HttpError(400, 'format must be "json" or a JSON schema.', param="format")
    return ResponseFormat("json_object")


def _no_images(param: str) -> HttpError:
    return unsupported(param, f"{param} is not supported: this model takes text only.")


class _Calls:
    """Ids of the calls of a conversation: results may name the tool only, and calls need no ids."""

    def __init__(self) -> None:
        self._num = 0
        self._open: list[tuple[str, str]] = []  # (name, id) of calls without a result, in order

    def begin(self, name: str, id: str | None) -> str:
        self._num += 1
        id = id or f"call_{self._num}"
        self._open.append((name, id))
        return id

    def end(self, name: str | None) -> str:
        """The id of the first open call of this tool; without a name, of any."""
        for call in self._open:
            if name is None or call[0] == name:
                self._open.remove(call)
                return call[1]
        return self.begin(name or "", None)


def _add(conversation: Conversation, calls: _Calls, message: OllamaMessage, place: str) -> None:
    if message.images:
        raise _no_images(f"{place}.images")
    text = message.content or ""
    if message.role == "tool":
        conversation.add_result(message.tool_call_id or calls.end(message.tool_name or message.name), [text])
        return
    if message.thinking and message.role == "assistant":
        conversation.add_reasoning(message.thinking)
    if text or not message.tool_calls:
        conversation.add_text(message.role, [text])
    for call in message.tool_calls or ():
        if message.role != "assistant":
            raise unsupported(f"{place}.tool_calls", f"{place}: only an assistant calls tools.")
        arguments = call.function.arguments
        if not isinstance(arguments, str):
            arguments = msgspec.json.encode(arguments or {}).decode()
        conversation.add_call(calls.begin(call.function.name, call.id), call.function.name, arguments)
