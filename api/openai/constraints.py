"""Translates formats, forced calls and thinking budgets of a request into a `Constraint`.

Owns the rules of which fields can be combined. Grammars are checked where they are compiled; only their size is checked
here, so that nothing large is sent.
"""

import json
from collections.abc import Sequence
from contextlib import suppress
from typing import Literal, NamedTuple

import msgspec

from ...config.config import EngineConfig
from ...ipc.messages import MAX_GRAMMAR_BYTES, Constraint, Source
from ..http.http_error import HttpError, unsupported
from ..output.parsers.family import Family
from ..output.parsers.registry import find_family
from ..output.parsers.spelling import ANY_OBJECT, CallRules, CannotSpell, Schema
from ..output.shapes import GenerationRequest, JsonSchema, ResponseFormat
from .types import ChatRequest, CompletionRequest, Tool

Kind = Literal["json_schema", "json_object", "regex", "choice", "lark"]
_ANY = json.dumps(ANY_OBJECT)
_RESERVED = 1024  # bytes of a grammar for our own rules around the schemas
_BUDGETS = ("thinking_token_budget", "thinking_budget")


class _Format(NamedTuple):
    """The format that a request asks for."""

    field: str
    kind: Kind
    text: str

    @property
    def source(self) -> Source:
        return Source("response_format.json_schema.schema" if self.field == "response_format" else self.field)


def completion_constraint(request: CompletionRequest) -> Constraint | None:
    """The constraint of a completion, whose format starts at once. Raises HttpError."""
    for name in _BUDGETS:
        if getattr(request, name) is not None:
            raise unsupported(name, f"{name} is for chat only.")
    format = _format(request, request.response_format)
    return None if format is None else Constraint(format.kind, format.text, sources=(format.source,))


def chat_constraint(request: ChatRequest, tools: Sequence[Tool], config: EngineConfig) -> Constraint | None:
    """The constraint of a chat, whose format or calls start after the reasoning. Raises HttpError."""
    format = _format(request, request.response_format)
    called = _called_tools(request, tools)
    family = find_family(config.tool_call_parser, config.reasoning_parser)
    tags = family.reasoning
    budget = _budget(request)
    if budget is not None and tags is None:
        detail = "thinking_token_budget needs to know how this model marks its reasoning: set --reasoning-parser."
        raise unsupported("thinking_token_budget", detail)
    if format is None and called is None and budget is None:
        return None
    constraint = Constraint(
        reasoning_starts=() if tags is None else tags[:1],
        reasoning_ends=() if tags is None else tags[1:],
        thinking_budget=budget,
    )
    if called is not None:
        if format is not None:
            detail = f"{format.field} cannot be combined with a tool_choice that forces a call."
            raise HttpError(400, detail, param=format.field)
        return _lark(constraint, "calls", called, _call_rules(request, called, family))
    if format is None:
        return constraint
    if format.kind == "json_schema" and request.tool_choice in (None, "auto") and family.spell is not None:
        possible = _that_can_be_called(tools, family)
        if possible:
            return _calls_or_answer(constraint, request, possible, format, family)
    if family.answer and format.kind == "lark":
        detail = f"{format.field} is not supported with this model, whose answers are messages of their own format."
        raise unsupported(format.field, detail)
    return msgspec.structs.replace(
        constraint, kind=format.kind, text=format.text, lark_marks=_answer_marks(family), sources=(format.source,)
    )


# ── formats ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def _format(request: GenerationRequest, response_format: ResponseFormat | None) -> _Format | None:
    """The format that is asked for. Raises HttpError if there are several."""
    outputs = request.structured_outputs
    spaces: dict[str, object] = {}
    found = [] if response_format is None else _response_format(response_format)
    if outputs is not None:
        if outputs.structural_tag:
            param = "structured_outputs.structural_tag"
            raise unsupported(param)
        if outputs.disable_any_whitespace:
            spaces["whitespace_flexible"] = False
        if outputs.whitespace_pattern is not None:
            spaces["whitespace_pattern"] = outputs.whitespace_pattern
    elif request.guided_whitespace_pattern is not None:
        spaces["whitespace_pattern"] = request.guided_whitespace_pattern
    for prefix, source in (("structured_outputs.", outputs), ("guided_", request)):
        for name, kind in (("json", "json_schema"), ("regex", "regex"), ("choice", "choice"), ("grammar", "lark")):
            value = getattr(source, name if prefix.endswith(".") else prefix + name, None)
            if value is not None:
                found.append((prefix + name, kind, value))
    for name, kind in (("regex", "regex"), ("ebnf", "lark"), ("grammar", "lark"), ("json_schema", "json_schema")):
        if (value := getattr(request, name)) is not None:
            found.append((name, kind, value))
    if outputs is not None and outputs.json_object:
        found.append(("structured_outputs.json_object", "json_object", None))
    if outputs is not None and not found:
        detail = "structured_outputs must have one of json, json_object, regex, choice and grammar."
        raise HttpError(400, detail, param="structured_outputs")
    if len(found) > 1:
        fields = [field for field, _, _ in found]
        raise HttpError(400, f"{fields[0]} and {fields[1]} cannot both be given.", param=fields[1])
    return _as_text(*found[0], spaces) if found else None


def _response_format(format: ResponseFormat) -> list[tuple[str, str, object]]:
    match format.type:
        case "text":
            return []
        case "json_object":
            return [("response_format", "json_object", None)]
        case "json_schema":
            if format.json_schema is None or format.json_schema.schema is None:
                raise HttpError(400, "response_format has no json_schema.schema.", param="response_format")
            return [("response_format", "json_schema", format.json_schema.schema)]
        case _:
            detail = 'response_format must be of type "text", "json_object" or "json_schema".'
            raise unsupported("response_format", detail)


def _as_text(field: str, kind: str, value: object, spaces: dict[str, object]) -> _Format:
    match kind:
        case "json_object":
            return _Format(field, "json_schema", _schema_text({"type": "object"}, spaces, field))
        case "json_schema":
            if isinstance(value, str):
                value = _parse_schema(value, field)
            assert isinstance(value, dict | bool)
            return _Format(field, "json_schema", _bounded(_schema_text(value, spaces, field), field))
        case "choice":
            if not value:
                raise HttpError(400, f"{field} must not be empty.", param=field)
            return _Format(field, "choice", _bounded(json.dumps(value), field))
        case _:
            assert isinstance(value, str)
            if not value.strip():
                raise HttpError(400, f"{field} must not be empty.", param=field)
            return _Format(field, "regex" if kind == "regex" else "lark", _bounded(value, field))


def _schema_text(schema: JsonSchema, spaces: dict[str, object], field: str) -> str:
    if spaces and isinstance(schema, dict):
        schema = {**schema, "x-guidance": spaces}
    try:
        return json.dumps(schema)
    except RecursionError:  # nearly too deep for the decoder of the body as well
        raise HttpError(400, f"{field} is nested too deeply.", param=field) from None


def _parse_schema(text: str, field: str) -> JsonSchema:
    try:
        schema: JsonSchema = msgspec.json.decode(text, type=dict[str, object] | bool)
    except (msgspec.DecodeError, RecursionError):
        raise HttpError(400, f"{field} is not a JSON schema.", param=field) from None
    return schema


def _bounded(text: str, field: str) -> str:
    if len(text) > MAX_GRAMMAR_BYTES:
        raise HttpError(400, f"{field} is larger than {MAX_GRAMMAR_BYTES} bytes.", param=field)
    return text


# ── calls ────────────────────────────────────────────────────────────────────────────────────────────────────────────


class _Called(NamedTuple):
    """A tool that may be called. `place`: its index in the request. `instead`: see `Source`."""

    place: int
    name: str
    schema: Schema
    instead: str = ""

    @property
    def field(self) -> str:
        return f"tools[{self.place}].function.parameters"

    @property
    def source(self) -> Source:
        return Source(self.field, self.name, self.instead)


def _called_tools(request: ChatRequest, tools: Sequence[Tool]) -> list[_Called] | None:
    """The tools of which one must be called; None if the model may answer without a call."""
    match request.tool_choice:
        case None | "none" | "auto":
            return None
        case "required":
            called = list(enumerate(tools))
        case {"type": "function", "function": {"name": str(name)}}:
            called = [(i, tool) for i, tool in enumerate(tools) if tool.function.name == name]
            if tools and not called:
                detail = f"tool_choice names {name[:80]!r}, which is not among the tools."
                raise HttpError(400, detail, param="tool_choice")
        case _:
            raise unsupported("tool_choice", 'tool_choice must be "none", "auto", "required" or name a function.')
    if not tools:
        raise HttpError(400, "tool_choice forces a call, but there are no tools.", param="tool_choice")
    return [_Called(i, tool.function.name, _object_schema(tool, i)) for i, tool in called]


def _that_can_be_called(tools: Sequence[Tool], family: Family) -> list[_Called]:
    """The tools that the model may call. One whose parameters cannot be enforced takes any object, as without a format.
    One that this family cannot call at all is left out."""
    found: list[_Called] = []
    for i, tool in enumerate(tools):
        with suppress(CannotSpell):
            try:
                called = _Called(i, tool.function.name, _object_schema(tool, i), _ANY)
                family.spell_calls([(called.name, called.schema)], several=False)
            except (HttpError, CannotSpell, RecursionError):
                called = _Called(i, tool.function.name, ANY_OBJECT, _ANY)
                family.spell_calls([(called.name, called.schema)], several=False)
            found.append(called)
    return found


def _calls_or_answer(
    constraint: Constraint,
    request: ChatRequest,
    called: Sequence[_Called],
    format: _Format,
    family: Family,
) -> Constraint:
    marks = _answer_marks(family)
    rules = _call_rules(request, called, family)
    if sum(len(rule) + 1 for rule in rules.rules) + len(format.text) > MAX_GRAMMAR_BYTES - _RESERVED:
        called = [one._replace(schema=ANY_OBJECT) for one in called]
        rules = _call_rules(request, called, family)
    before = f"mark{len(rules.marks)} " if marks else ""
    either = CallRules([*rules.rules, f"answer: {before}%json {format.text}"], (*rules.marks, *marks))
    return _lark(constraint, "calls | answer", called, either, format)


def _lark(
    constraint: Constraint, start: str, called: Sequence[_Called], rules: CallRules, format: _Format | None = None
) -> Constraint:
    text = _bounded("\n".join([f"start: {start}", *rules.rules]), "tools")
    sources = tuple(_source(rule, called, format) for rule in rules.rules if "%json " in rule)
    return msgspec.structs.replace(constraint, kind="lark", text=text, lark_marks=rules.marks, sources=sources)


def _source(rule: str, called: Sequence[_Called], format: _Format | None) -> Source:
    """The source of a rule's schema, from the rule's name: `arguments2`, or `schema2_0` in families that write keywords
    and have a schema for each property."""
    name = rule.partition(":")[0]
    if name == "answer":
        assert format is not None, rule
        return format.source
    if name.startswith("arguments"):
        return called[int(name.removeprefix("arguments"))].source
    source = called[int(name.removeprefix("schema").partition("_")[0])].source
    return msgspec.structs.replace(source, instead=source.instead and "{}")


def _answer_marks(family: Family) -> tuple[str, ...]:
    """The mark that begins an answer, if the family has one."""
    return (family.answer,) if family.answer else ()


def _call_rules(request: ChatRequest, called: Sequence[_Called], family: Family) -> CallRules:
    several = request.parallel_tool_calls is not False and not isinstance(request.tool_choice, dict)
    for one in called:
        try:
            family.spell_calls([(one.name, one.schema)], several=False)
        except CannotSpell as error:
            param = f"tools[{one.place}].function.{error.field}"
            raise unsupported(param, f"{param}: {error}.") from None
        except RecursionError:
            raise HttpError(400, f"{one.field} is nested too deeply.", param=one.field) from None
    rules = family.spell_calls([(one.name, one.schema) for one in called], several=several)
    if rules is None:
        detail = "tool_choice can force a call only if it is known how the model writes calls: set --tool-call-parser."
        raise unsupported("tool_choice", detail)
    return rules


def _object_schema(tool: Tool, place: int) -> Schema:
    """A tool's parameters as the schema of an object. Raises HttpError."""
    parameters = tool.function.parameters
    if parameters is None:
        return {"type": "object", "properties": {}, "additionalProperties": False}
    if parameters is True:
        return ANY_OBJECT
    if not isinstance(parameters, dict) or parameters.get("type", "object") != "object":
        param = f"tools[{place}].function.parameters"
        name = tool.function.name[:80]
        raise HttpError(400, f"{param} (of {name!r}) must be the schema of an object.", param=param)
    return {"type": "object", **parameters}


# ── reasoning ────────────────────────────────────────────────────────────────────────────────────────────────────────


def _budget(request: ChatRequest) -> int | None:
    if request.thinking_token_budget is not None and request.thinking_budget is not None:
        raise HttpError(400, "thinking_token_budget and thinking_budget cannot both be given.", param="thinking_budget")
    budget = request.thinking_token_budget if request.thinking_budget is None else request.thinking_budget
    return None if budget is None or budget < 0 else budget
