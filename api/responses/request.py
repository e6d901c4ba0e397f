"""Translates requests of the Responses API into chat requests. Fields without a counterpart are refused by name if
ignoring them would change the answer.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import msgspec

from ...errors import RequestError
from ..http.http_error import HttpError, as_http_error, unsupported
from ..openai.conversation import Conversation
from ..openai.plain_tools import INPUT, allowed_mode, custom_function, with_allowed
from ..openai.types import ChatRequest
from ..output.shapes import GenerationRequest, ResponseFormat
from .types import InputItem, InputPart, ResponsesRequest, ResponseTool

FindItem = Callable[[str], InputItem | None]

_REFUSED = (
    "prompt", "context_management", "max_tokens", "enable_response_messages",
    "use_beam_search", "return_tokens_as_token_ids",
)  # fmt: skip
_KNOWN = (
    None, "message", "function_call", "function_call_output", "custom_tool_call", "custom_tool_call_output",
)  # fmt: skip
_FUNCTIONS = ("function", "custom")
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
        if tool.type in _FUNCTIONS and not tool.name:
            raise HttpError(400, f"A {tool.type} tool needs a name.", param=f"tools[{i}].name")
    if request.background and request.store is False:
        raise HttpError(400, "background needs store: the response is asked for later.", param="store")
    if request.background and request.return_token_ids:
        raise HttpError(400, "return_token_ids cannot be combined with background.", param="return_token_ids")
    if request.conversation is not None and request.previous_response_id is not None:
        detail = "conversation and previous_response_id cannot both be given."
        raise HttpError(400, detail, param="previous_response_id")


def wants_logprobs(request: ResponsesRequest) -> bool:
    """Whether the answer has log-probabilities, perhaps without candidates."""
    return request.top_logprobs is not None or _LOGPROBS in (request.include or ())


def functions(request: ResponsesRequest) -> list[ResponseTool]:
    """The tools in the prompt. Clients also send tools that the server should run; it runs none."""
    return [tool for tool in request.tools or () if tool.type in _FUNCTIONS]


def custom_names(request: ResponsesRequest) -> frozenset[str]:
    """The names of the custom tools."""
    return frozenset(tool.name for tool in request.tools or () if tool.type == "custom" and tool.name)


def conversation_of(request: ResponsesRequest, earlier: bytes, find: FindItem) -> Conversation:
    """`input` after the `earlier` conversation, without the instructions. `find`: the item that an `item_reference`
    means. Raises HttpError."""
    conversation = Conversation(earlier)
    match request.input:
        case str(text):
            conversation.add_text("user", [text])
        case list(items) if items:
            for i, item in enumerate(items):
                if _is_reference(item):
                    item = _referred(item, f"input[{i}]", find)
                add_item(conversation, item, f"input[{i}]")
        case _:
            raise HttpError(400, "input must be a string or a list of items, and not empty.", param="input")
    return conversation


def chat_request(request: ResponsesRequest, messages: bytes) -> ChatRequest:
    """The request as a chat request. `messages`: the conversation without instructions; it is not empty."""
    tools = [{"type": "function", "function": _function(tool)} for tool in functions(request)]
    if request.instructions:
        # Instructions are for this response only, so they are not stored with the conversation.
        instructions = msgspec.json.encode({"role": "system", "content": request.instructions})
        messages = b"[" + instructions + b"," + messages[1:]
    chat = ChatRequest(
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
    allowed = _allowed(request.tool_choice)
    return chat if allowed is None else with_allowed(chat, allowed)


def _function(tool: ResponseTool) -> dict[str, object]:
    if tool.type == "custom":
        return custom_function(tool.name or "", tool.description, tool.format)
    return {
        "name": tool.name,
        "description": tool.description or "",
        "parameters": tool.parameters or {"type": "object", "properties": {}},
    }


@contextmanager
def in_terms_of_responses(request: ResponsesRequest) -> Iterator[None]:
    """Rewrites errors of chat and the engine with this API's field names."""
    places = [i for i, tool in enumerate(request.tools or ()) if tool.type in _FUNCTIONS]

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


def _allowed(choice: str | dict[str, object] | None) -> tuple[str, frozenset[str]] | None:
    """The mode and the names of a choice of some tools. Tools that the server would run are left out."""
    match choice:
        case {"type": "allowed_tools", "mode": str(mode), "tools": list(tools)}:
            named = [tool for tool in tools if isinstance(tool, dict) and tool.get("type") in _FUNCTIONS]
            return allowed_mode(mode), frozenset(name for tool in named if isinstance(name := tool.get("name"), str))
        case {"type": "allowed_tools"}:
            raise HttpError(400, "tool_choice must have a mode and a list of tools.", param="tool_choice")
        case _:
            return None


def _tool_choice(choice: str | dict[str, object] | None) -> str | dict[str, object] | None:
    match choice:
        case {"type": "allowed_tools"}:
            return None
        case {"type": "function" | "custom", "name": str(name)}:
            return {"type": "function", "function": {"name": name}}
        case dict():
            detail = "tool_choice must be a word or name a function; the server runs no tools itself."
            raise unsupported("tool_choice", detail)
        case _:
            return choice


def references(request: ResponsesRequest) -> list[str]:
    """The ids of the stored items that the input refers to."""
    return (
        [item.id for item in request.input if _is_reference(item) and item.id]
        if isinstance(request.input, list)
        else []
    )


def _is_reference(item: InputItem) -> bool:
    return item.type == "item_reference" or (item.type is None and item.role is None and item.id is not None)


def _referred(item: InputItem, place: str, find: FindItem) -> InputItem:
    found = find(item.id or "")
    if found is None:
        detail = f"{place}: there is no item {(item.id or '')[:100]!r}; only the latest responses are stored."
        raise HttpError(400, detail, param=f"{place}.id")
    return found


def add_item(conversation: Conversation, item: InputItem, place: str) -> None:
    match item:
        case InputItem(type=None | "message", role=str(role)):
            conversation.add_text(role, _texts(item.content, f"{place}.content"))
        case InputItem(type="function_call", call_id=str(call_id), name=str(name)):
            conversation.add_call(call_id, name, item.arguments or "{}")
        case InputItem(type="function_call_output", call_id=str(call_id)):
            conversation.add_result(call_id, _texts(item.output, f"{place}.output"))
        case InputItem(type="custom_tool_call", call_id=str(call_id), name=str(name)):
            conversation.add_call(call_id, name, msgspec.json.encode({INPUT: item.input or ""}).decode())
        case InputItem(type="custom_tool_call_output", call_id=str(call_id)):
            conversation.add_result(call_id, _texts(item.output, f"{place}.output"))
        case InputItem(type="reasoning"):
            for text in _texts(item.content if item.content is not None else [], f"{place}.content"):
                conversation.add_reasoning(text)
        case InputItem(type=kind) if kind in _KNOWN:
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
