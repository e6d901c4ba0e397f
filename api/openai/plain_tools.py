"""Rewrites a chat request whose tools are not simply functions: `functions` and `function_call`, which came before
tools; custom tools, whose input is a text; and the `tool_choice` that allows some of the tools.

All that follows, the template included, sees functions and an ordinary `tool_choice`.
"""

from collections.abc import Callable
from typing import Annotated

import msgspec
from msgspec import Meta, Raw, Struct
from msgspec.structs import replace

from ..http.http_error import HttpError, unsupported
from ..output.shapes import CustomFormat
from .translate import decode_part
from .types import ChatRequest, FunctionDefinition

INPUT = "input"  # the one argument of the function that a custom tool becomes
_Fields = dict[str, object]


class _Custom(Struct, frozen=True):
    name: Annotated[str, Meta(min_length=1)]
    description: str | None = None
    format: CustomFormat | None = None


class _AnyTool(Struct, frozen=True):
    """The fields by which a custom tool is told from a function; other fields are left to the check of tools."""

    type: str | None = None
    custom: _Custom | None = None


class _Named(Struct, frozen=True):
    name: str


class _AllowedTool(Struct, frozen=True):
    type: str
    function: _Named | None = None
    custom: _Named | None = None


class _Allowed(Struct, frozen=True):
    mode: str
    tools: list[_AllowedTool]


_tools_decoder = msgspec.json.Decoder(list[_AnyTool])
_fields_decoder = msgspec.json.Decoder(list[_Fields])


def custom_function(name: str, description: str | None, format: CustomFormat | None) -> _Fields:
    """The function that stands for a custom tool. A regular expression is enforced where a call is forced; a grammar
    cannot be, within a JSON string, so the model is only told of it."""
    schema: _Fields = {"type": "string"}
    notes = [description] if description else []
    if format is not None and format.type == "grammar" and format.definition is not None:
        if format.syntax == "regex":
            schema["pattern"] = f"^(?:{format.definition})$"
        notes.append(f"The input follows this {format.syntax or 'lark'} grammar:\n{format.definition}")
    parameters = {"type": "object", "properties": {INPUT: schema}, "required": [INPUT], "additionalProperties": False}
    return {"name": name, "description": "\n\n".join(notes), "parameters": parameters}


def with_plain_tools(request: ChatRequest) -> tuple[ChatRequest, frozenset[str]]:
    """(the request with functions only, the names of those that are custom tools). Raises HttpError."""
    if request.functions is not None or request.function_call is not None:
        request = _with_functions_as_tools(request)
    custom: frozenset[str] = frozenset()
    if b'"custom"' in bytes(request.tools):
        request, custom = _without_custom(request)
    match request.tool_choice:
        case {"type": "custom", "custom": {"name": str(name)}}:
            request = replace(request, tool_choice={"type": "function", "function": {"name": name}})
        case {"type": "allowed_tools", "allowed_tools": object() as allowed}:
            request = with_allowed(request, _allowed(allowed))
    return request, custom


def with_allowed(request: ChatRequest, allowed: tuple[str, frozenset[str]]) -> ChatRequest:
    """The request with these tools only. `allowed`: auto or required, and the names. Raises HttpError."""
    mode, names = allowed
    tools = decode_part(lambda: _fields_decoder.decode(request.tools), "tools") if bytes(request.tools) else []
    kept = [tool for tool in tools if isinstance(of := tool.get("function"), dict) and of.get("name") in names]
    known = {of.get("name") for tool in tools if isinstance(of := tool.get("function"), dict)}
    if missing := sorted(names - {name for name in known if isinstance(name, str)}):
        detail = f"tool_choice allows {missing[0][:80]!r}, which is not among the tools."
        raise HttpError(400, detail, param="tool_choice")
    return replace(request, tools=Raw(msgspec.json.encode(kept)), tool_choice=mode)


def _allowed(value: object) -> tuple[str, frozenset[str]]:
    try:
        allowed = msgspec.convert(value, _Allowed)
    except msgspec.ValidationError:
        detail = "tool_choice.allowed_tools must have a mode, which is auto or required, and a list of tools."
        raise HttpError(400, detail, param="tool_choice") from None
    names = [named.name for tool in allowed.tools if (named := tool.function or tool.custom) is not None]
    return allowed_mode(allowed.mode), frozenset(names)


def allowed_mode(mode: str) -> str:
    """Raises HttpError unless it is auto or required."""
    if mode not in ("auto", "required"):
        raise HttpError(400, "The mode of allowed tools must be auto or required.", param="tool_choice")
    return mode


# ── custom tools ─────────────────────────────────────────────────────────────────────────────────────────────────────


def _without_custom(request: ChatRequest) -> tuple[ChatRequest, frozenset[str]]:
    kinds = decode_part(lambda: _tools_decoder.decode(request.tools), "tools")
    tools = decode_part(lambda: _fields_decoder.decode(request.tools), "tools")
    names: set[str] = set()
    for i, (kind, tool) in enumerate(zip(kinds, tools, strict=True)):
        if kind.type == "custom":
            if kind.custom is None:
                raise HttpError(400, f"tools[{i}].custom is missing.", param=f"tools[{i}].custom")
            names.add(kind.custom.name)
            function = custom_function(kind.custom.name, kind.custom.description, kind.custom.format)
            tool.clear()
            tool.update({"type": "function", "function": function})
    messages = request.messages
    if b'"custom"' in bytes(messages):
        messages = _rewritten(messages, _plain_call)
    return replace(request, tools=Raw(msgspec.json.encode(tools)), messages=messages), frozenset(names)


def _plain_call(message: _Fields) -> None:
    """Writes an assistant's calls of custom tools as calls of functions."""
    calls = message.get("tool_calls")
    for call in calls if isinstance(calls, list) else ():
        if isinstance(call, dict) and isinstance(custom := call.get("custom"), dict):
            arguments = msgspec.json.encode({INPUT: custom.get("input", "")}).decode()
            call |= {"type": "function", "function": {"name": custom.get("name", ""), "arguments": arguments}}
            del call["custom"]


# ── functions ────────────────────────────────────────────────────────────────────────────────────────────────────────


def _with_functions_as_tools(request: ChatRequest) -> ChatRequest:
    if bytes(request.tools) not in (b"", b"null"):
        raise HttpError(400, "functions and tools cannot both be given.", param="functions")
    if request.tool_choice is not None:
        raise HttpError(400, "tool_choice needs tools; functions are chosen by function_call.", param="tool_choice")
    choice: str | _Fields | None
    match request.function_call:
        case None | "auto" | "none" as word:
            choice = word
        case {"name": str(name)}:
            choice = {"type": "function", "function": {"name": name}}
        case _:
            raise unsupported("function_call", 'function_call must be "none", "auto" or name a function.')
    tools = [{"type": "function", "function": _function(function)} for function in request.functions or ()]
    return replace(
        request,
        tools=Raw(msgspec.json.encode(tools)),
        tool_choice=choice,
        parallel_tool_calls=False,  # an answer has one `function_call`
        messages=_rewritten(request.messages, _FunctionCalls().rewrite),
    )


def _function(function: FunctionDefinition) -> _Fields:
    fields: _Fields = {"name": function.name, "description": function.description, "parameters": function.parameters}
    return {name: value for name, value in fields.items() if value is not None}


class _FunctionCalls:
    """Writes `function_call` and messages of the role `function` as calls and results of tools, message by message."""

    def __init__(self) -> None:
        self._num_calls = 0

    def rewrite(self, message: _Fields) -> None:
        call = message.pop("function_call", None)
        if call is not None:
            self._num_calls += 1
            message["tool_calls"] = [{"id": self._id, "type": "function", "function": call}]
        if message.get("role") == "function":
            message |= {"role": "tool", "tool_call_id": self._id}

    @property
    def _id(self) -> str:
        return f"call_{self._num_calls}"


def _rewritten(messages: Raw, rewrite: Callable[[_Fields], None]) -> Raw:
    fields = decode_part(lambda: _fields_decoder.decode(messages), "messages")
    for message in fields:
        rewrite(message)
    return Raw(msgspec.json.encode(fields))
