"""Granite 3: `<|tool_call|>[{"name": …, "arguments": {…}}, …]`; 3.0 also writes one object without brackets, and 3.1
`<tool_call>[…]`. Granite 4 writes calls as Hermes does. Reasoning is `<think>…</think>`, and then the answer stands in
`<response>…</response>`."""

from ..block import Block, Broken, Reads, call_object, skip_space
from ..call_list import call_list, spell_call_list
from ..family import Family
from ..lexer import Grammar
from ..spelling import CallRules, Tools, call_objects, rule

_TAG, _TEXT = "<|tool_call|>", "<tool_call>"


def _read(tag: str, block: Block) -> Reads[str]:
    char = yield from skip_space()
    if char == "[":
        yield from call_list(block)
        return ""
    if char != "{":
        raise Broken
    yield from call_object(block, char)
    return ""


def _spell(tools: Tools, several: bool) -> CallRules:
    return CallRules([rule("calls", "mark0", *spell_call_list(several)), *call_objects(tools, "arguments")], (_TAG,))


def _is_granite(template: str) -> bool:
    return "<|start_of_role|>" in template


GRANITE = Family(
    calls=Grammar(_read, tags=(_TAG, _TEXT)),
    spell=_spell,
    shows_calls=lambda template: _is_granite(template) and "</tool_call>" not in template,
    reasoning=("<think>", "</think>"),
    answer_tags=("<response>", "</response>"),
    shows_reasoning=lambda template: _is_granite(template) and "<think>" in template,
)
