"""Mistral: `[TOOL_CALLS][{"name": …, "arguments": {…}}, …]`; from 2025 on `[TOOL_CALLS]name[ARGS]{…}` for each call.
Reasoning is `[THINK]…[/THINK]`."""

from ..block import MAX_NAME, Block, Broken, Reads, arguments, call_name, skip_space, until
from ..call_list import call_list, spell_call_list
from ..family import Family
from ..lexer import Grammar
from ..spelling import CallRules, Tools, call_objects, one_of, repeat, rule

_CALLS, _ARGS, _CALL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"


def _read(tag: str, block: Block) -> Reads[str]:
    char = yield from skip_space()
    if char == "[":
        yield from call_list(block)
        return ""
    name, char = yield from call_name(char)
    if char == "[":
        mark = char + (yield from until("]", MAX_NAME)) + "]"
        if mark == _CALL_ID:
            mark = "[" + (yield from until("]", MAX_NAME)).rpartition("[")[2] + "]"
        if mark != _ARGS:
            raise Broken
        char = yield from skip_space()
    if char != "{":
        raise Broken
    block.start(name)
    yield from arguments(block, char)
    return ""


def _spell(tools: Tools, several: bool) -> CallRules:
    """Both forms: a model knows one of them."""
    older = ["mark0", *spell_call_list(several)]
    rules = [
        rule("calls", *older, "|", repeat("named", "", several)),
        *one_of("named", ["mark0", "name", "mark1", "arguments"], tools),
        *call_objects(tools, "arguments"),
    ]
    return CallRules(rules, (_CALLS, _ARGS))


MISTRAL = Family(
    calls=Grammar(_read, tags=(_CALLS,), marks=(_ARGS, _CALL_ID)),
    spell=_spell,
    shows_calls=lambda template: _CALLS in template,
    reasoning=("[THINK]", "[/THINK]"),
    shows_reasoning=lambda template: "[THINK]" in template,
)
