"""Llama 3: `{"name": …, "parameters": {…}}` at the start or after `<|python_tag|>`, several joined by `;`."""

from ..block import Block, Reads, call_object, skip_space
from ..family import Family
from ..lexer import Grammar
from ..spelling import CallRules, Tools, call_objects, repeat, rule

_TAG = "<|python_tag|>"


def _read(tag: str, block: Block) -> Reads[str]:
    char = tag if tag == "{" else (yield from skip_space())
    yield from call_object(block, char, needs_arguments=True)
    while (char := (yield from skip_space())) == ";":
        yield from call_object(block, (yield from skip_space()), needs_arguments=True)
    return char


def _spell(tools: Tools, several: bool) -> CallRules:
    calls = rule("calls", "mark0?", repeat("object", "; ", several))
    return CallRules([calls, *call_objects(tools, "parameters")], (_TAG,))


def _is_shown(template: str) -> bool:
    asks_for_python = "[func_name1(" in template
    return not asks_for_python and (_TAG in template or '{"name": function name, "parameters":' in template)


LLAMA3_JSON = Family(
    calls=Grammar(_read, leads=("{",), tags=(_TAG,)),
    spell=_spell,
    shows_calls=_is_shown,
)
