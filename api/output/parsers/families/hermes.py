"""Hermes, Qwen and many others: `<tool_call>{"name": …, "arguments": {…}}</tool_call>`."""

from ..block import Block, Reads, call_object, closing, skip_space
from ..family import Family
from ..lexer import Grammar
from ..spelling import CallRules, Tools, call_objects, literal, repeat, rule

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"


def _read(tag: str, block: Block) -> Reads[str]:
    yield from call_object(block, (yield from skip_space()))
    yield from closing(_CLOSE)
    return ""


def _spell(tools: Tools, several: bool) -> CallRules:
    calls = rule("calls", repeat("call", "\n", several))
    call = rule("call", "mark0", literal("\n"), "object", literal("\n"), "mark1")
    return CallRules([calls, call, *call_objects(tools, "arguments")], (_OPEN, _CLOSE))


HERMES = Family(
    calls=Grammar(_read, tags=(_OPEN,), marks=(_CLOSE,)),
    spell=_spell,
    shows_calls=lambda template: _OPEN in template,
)
