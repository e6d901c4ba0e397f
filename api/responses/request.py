"""Translates requests of the Responses API into chat requests. Fields without a counterpart are refused by name if
ignoring them would change the answer.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import msgspec

from ...errors import RequestError
from ..http.http_error import HttpError, as_http_error, unsupported
from ..openai.conversation import Conversation
from ..openai.types import ChatRequest
from ..output.shapes import GenerationRequest, ResponseFormat
from .types import InputItem, InputPart, ResponsesRequest, ResponseTool

_REFUSED = (
    "background", "conversation", "prompt", "context_management", "max_tokens",
    "use_beam_search", "return_tokens_as_token_ids",
)  # fmt: skip
_TEXTS = ("input_text", "output_text", "text", "summary_text", "reasoning_text")
_OWN = ("max_tokens", "return_token_ids")  # chat has them, but they are not copied
_OWN_NAMES = {"response_format": "text.format", "response_format.json_schema.schema": "text.format.schema"}
_SHARED = tuple(name for name in GenerationRequest.__struct_fields__ if name not in _OWN)
_LOGPROBS = "message.output_text.logprobs"


def check_response(request: ResponsesRequest) -> None:
    """Raises HttpError if the request has a field that cannot be served."""
    for name in _REFUSED:
        if getattr(request, name):
            raise unsupported(name)
    for name in ("prompt_logprobs", "kv_transfer_params", "cache_hit_threshold"):
        if getattr(request, name) is not None:
            raise unsupported(name)
    if request.n not in (None, 1):
        raise unsupported("n")
    if request.return_token_ids and not request.stream:
        raise unsupported("return_token_ids", "return_token_ids without stream is not supported.")
    for i, tool in enumerate(request.tools or ()):
        if tool.type == "function" and not tool.name:
            raise HttpError(400, "A function needs a name.", param=f"tools[{i}].name")


def wants_logprobs(request: ResponsesRequest) -> bool:
    """Whether the answer has log-probabilities, perhaps without candidates."""
    return request.top_logprobs is not None or _LOGPROBS in (request.include or ())


def functions(request: ResponsesRequest) -> list[ResponseTool]:
    """The tools in the prompt. Clients also send tools that the server should run; it runs none."""
    return [tool for tool in request.tools or () if tool.type == "function"]


def conversation_of(request: ResponsesRequest, earlier: bytes) -> Conversation:
    """`input` after the `earlier` conversation, without the instructions. Raises HttpError."""
    conversation = Conversation(earlier)
    match request.input:
        case str(text):
            conversation.add_text("user", [text])
        case list(items) if items:
            for i, item in enumerate(items):
                _add_item(conversation, item, f"input[{i}]")
        case _:
            raise HttpError(400, "input must be a string or a list of items, and not empty.", param="input")
    return conversation


def chat_request(request: ResponsesRequest, messages: bytes) -> ChatRequest:
    """The request as a chat request. `messages`: the conversation without instructions; it is not empty."""
    tools = [
        {
            "type": "function",
            "function": {
                "name": tool.name,
                "description": tool.description or "",
                "parameters": tool.parameters or {"type": "object", "properties": {}},
            },
        }
        for tool in functions(request)
    ]
    if request.instructions:
        # Instructions are for this response only, so they are not stored with the conversation.
        instructions = msgspec.json.encode({"role": "system", "content": request.instructions})
        messages = b"[" + instructions + b"," + messages[1:]
    return ChatRequest(
        **{name: getattr(request, name) for name in _SHARED},
        messages=msgspec.Raw(messages),
        resume_token_ids=request.resume_token_ids,
        tools=msgspec.Raw(msgspec.json.encode(tools)),
        tool_choice=_tool_choice(request.tool_choice),
        parallel_tool_calls=request.parallel_tool_calls,
        max_completion_tokens=request.max_output_tokens,
        logprobs=wants_logprobs(request),
        top_logprobs=request.top_logprobs,
        response_format=_response_format(request),
        reasoning_effort=request.reasoning.effort if request.reasoning is not None else None,
        chat_template_kwargs=request.chat_template_kwargs,
    )


@contextmanager
def in_terms_of_responses(request: ResponsesRequest) -> Iterator[None]:
    """Rewrites errors of chat and the engine with this API's field names."""
    places = [i for i, tool in enumerate(request.tools or ()) if tool.type == "function"]

    def own_name(param: str) -> str:
        if param.startswith("tools["):
            place, _, rest = param.removeprefix("tools[").partition("].function.")
            return f"tools[{places[int(place)]}].{rest}"
        return _OWN_NAMES.get(param, param)

    try:
        yield
    except (HttpError, RequestError) as error:
        raise as_http_error(error).with_name(own_name) from None


def _response_format(request: ResponsesRequest) -> ResponseFormat | None:
    if request.text is None or request.text.format is None:
        return None
    return request.text.format.as_response_format()


def _tool_choice(choice: str | dict[str, object] | None) -> str | dict[str, object] | None:
    match choice:
        case {"type": "function", "name": str(name)}:
            return {"type": "function", "function": {"name": name}}
        case dict():
            detail = "tool_choice must be a word or name a function; the server runs no tools itself."
            raise unsupported("tool_choice", detail)
        case _:
            return choice


def _add_item(conversation: Conversation, item: InputItem, place: str) -> None:
    match item:
        case InputItem(type=None | "message", role=str(role)):
            conversation.add_text(role, _texts(item.content, f"{place}.content"))
        case InputItem(type="function_call", call_id=str(call_id), name=str(name)):
            conversation.add_call(call_id, name, item.arguments or "{}")
        case InputItem(type="function_call_output", call_id=str(call_id)):
            conversation.add_result(call_id, _texts(item.output, f"{place}.output"))
        case InputItem(type="reasoning"):
            for text in _texts(item.content if item.content is not None else [], f"{place}.content"):
                conversation.add_reasoning(text)
        case InputItem(type=None | "message" | "function_call" | "function_call_output"):
            lacking = "role" if item.type in (None, "message") else "name" if item.call_id is not None else "call_id"
            raise HttpError(400, f"{place} has no {lacking}.", param=f"{place}.{lacking}")
        case _:
            raise unsupported(f"{place}.type", f"Items of type {str(item.type)[:40]!r} are not supported.")


def _texts(content: str | Sequence[InputPart] | None, place: str) -> list[str]:
    if isinstance(content, str):
        return [content]
    if content is None:
        raise HttpError(400, f"{place} must be a string or a list of parts.", param=place)
    texts: list[str] = []
    for i, part in enumerate(content):
        text = part.refusal if part.type == "refusal" else part.text if part.type in _TEXTS else None
        if text is None:
            detail = f"This model takes text only; a content part of type {part.type[:40]!r} was sent."
            raise unsupported(f"{place}[{i}].type", detail)
        texts.append(text)
    return texts
