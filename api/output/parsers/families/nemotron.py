"""Nemotron (Super 49B v1.5, Nano 9B v2): `<TOOLCALL>[{"name": …, "arguments": {…}}, …]</TOOLCALL>`. Reasoning is
`<think>…</think>`. Nemotron 3 writes calls as Qwen3-Coder does."""

from ..block import Block, Broken, Reads, closing, skip_space
from ..call_list import call_list, spell_call_list
from ..family import Family
from ..lexer import Grammar
from ..spelling import CallRules, Tools, call_objects, rule

_OPEN, _CLOSE = "<TOOLCALL>", "</TOOLCALL>"


def _read(tag: str, block: Block) -> Reads[str]:
    if (yield from skip_space()) != "[":
        raise Broken
    yield from call_list(block)
    yield from closing(_CLOSE)
    return ""


def _spell(tools: Tools, several: bool) -> CallRules:
    calls = rule("calls", "mark0", *spell_call_list(several), "mark1")
    return CallRules([calls, *call_objects(tools, "arguments")], (_OPEN, _CLOSE))


NEMOTRON = Family(
    calls=Grammar(_read, tags=(_OPEN,), marks=(_CLOSE,)),
    spell=_spell,
    shows_calls=lambda template: _OPEN in template,
)
