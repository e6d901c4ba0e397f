"""DeepSeek. V3 and R1 write `<｜tool▁call▁begin｜>function<｜tool▁sep｜>name`, a newline, the arguments in a
```json fence and `<｜tool▁call▁end｜>`; V3.1 writes `<｜tool▁call▁begin｜>name<｜tool▁sep｜>{…}<｜tool▁call▁end｜>`.
The pair of tags around all calls carries no information. Reasoning is `<think>…</think>`.
"""

from collections.abc import Sequence

from ..block import MAX_NAME, Block, Broken, Reads, arguments, closing, skip_space, until
from ..family import Family
from ..lexer import Grammar
from ..spelling import CallRules, Tools, argument_schemas, literal, one_of, repeat, rule

_CALLS, _CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_CALL, _SEP, _CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
_FENCE = "```json\n"


def _read(tag: str, block: Block) -> Reads[str]:
    if tag != _CALL:
        block.settle()
        return ""
    name = (yield from until(_SEP, MAX_NAME)).strip()
    char = yield from skip_space()
    if char != "{":
        if name != "function":
            raise Broken
        name = (char + (yield from until("\n", MAX_NAME))).strip()
        if (yield from until("\n", len(_FENCE))) + "\n" != _FENCE:
            raise Broken
        char = yield from skip_space()
    if char != "{":
        raise Broken
    block.start(name)
    yield from arguments(block, char)
    yield from closing(_CALL_END)
    return ""


def _spell_v3(tools: Tools, several: bool) -> CallRules:
    fenced = [literal("\n" + _FENCE), "arguments", literal("\n```")]
    return _spell(["mark1", literal("function"), "mark2", "name", *fenced, "mark3"], "\n", tools, several)


def _spell_v31(tools: Tools, several: bool) -> CallRules:
    return _spell(["mark1", "name", "mark2", "arguments", "mark3"], "", tools, several)


def _spell(parts: Sequence[str], between: str, tools: Tools, several: bool) -> CallRules:
    calls = rule("calls", "mark0", repeat("call", between, several), "mark4")
    rules = [calls, *one_of("call", parts, tools), *argument_schemas(tools)]
    return CallRules(rules, (_CALLS, _CALL, _SEP, _CALL_END, _CALLS_END))


_GRAMMAR = Grammar(_read, tags=(_CALLS, _CALLS_END, _CALL), marks=(_SEP, _CALL_END))
V3 = Family(
    calls=_GRAMMAR, spell=_spell_v3, shows_calls=lambda template: _CALL in template and _FENCE.strip() in template
)
V31 = Family(calls=_GRAMMAR, spell=_spell_v31, shows_calls=lambda template: _CALL in template)
R1 = Family(
    reasoning=("<think>", "</think>"),
    shows_reasoning=lambda template: "</think>" in template and "<｜Assistant｜>" in template,
)
