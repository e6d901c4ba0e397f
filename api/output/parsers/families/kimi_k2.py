"""Kimi K2: `<|tool_call_begin|>functions.name:0<|tool_call_argument_begin|>{…}<|tool_call_end|>` for each call, between
two tags around all calls, which carry no information. The number counts the calls of a conversation. Reasoning is
`<think>…</think>`; Kimi-VL and Kimi-Dev write `◁think▷…◁/think▷`."""

from ..block import MAX_NAME, Block, Broken, Reads, arguments, closing, skip_space, until
from ..family import Family
from ..lexer import Grammar
from ..spelling import MAX_CALLS, CallRules, Tools, argument_schemas, literal, one_of, repeat, rule

_CALLS, _CALLS_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
_CALL, _ARGUMENTS, _CALL_END = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"
_PREFIX = "functions."


def _read(tag: str, block: Block) -> Reads[str]:
    if tag != _CALL:
        block.settle()
        return ""
    id = (yield from until(_ARGUMENTS, MAX_NAME + len(_PREFIX + _ARGUMENTS))).strip()
    name, colon, number = id.removeprefix(_PREFIX).rpartition(":")
    if not (colon and number.isdecimal()):
        name = id.removeprefix(_PREFIX)
    char = yield from skip_space()
    if char != "{":
        raise Broken
    block.start(name)
    yield from arguments(block, char)
    yield from closing(_CALL_END)
    return ""


def _spell(tools: Tools, several: bool) -> CallRules:
    parts = ["mark1", literal(_PREFIX), "name", literal(":"), "number", "mark2", "arguments", "mark3"]
    rules = [rule("calls", "mark0", repeat("call", "", several), "mark4"), *one_of("call", parts, tools)]
    rules += [rule("number", f"/[0-9]{{1,{len(str(MAX_CALLS)) + 1}}}/"), *argument_schemas(tools)]
    return CallRules(rules, (_CALLS, _CALL, _ARGUMENTS, _CALL_END, _CALLS_END))


K2 = Family(
    calls=Grammar(_read, tags=(_CALLS, _CALLS_END, _CALL), marks=(_ARGUMENTS, _CALL_END)),
    spell=_spell,
    shows_calls=lambda template: _CALL in template and _ARGUMENTS in template,
    reasoning=("<think>", "</think>"),
    shows_reasoning=lambda template: _CALL in template and "</think>" in template,
)
TRIANGLES = Family(reasoning=("◁think▷", "◁/think▷"), shows_reasoning=lambda template: "◁/think▷" in template)
