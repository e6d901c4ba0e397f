"""Harmony, which gpt-oss writes: an output is a row of messages, each with a header that names recipient and channel.

`<|channel|>analysis<|message|>…<|end|><|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json
<|message|>{…}<|call|>`: analysis is reasoning, a message to a function is a call, everything else is text. The prompt
ends with `<|start|>assistant`, so the first header may go on with ` to=`.
"""

from ..block import Block, Reads, arguments, skip_space, until
from ..family import Family
from ..lexer import Grammar
from ..spelling import CallRules, Tools, argument_schemas, literal, one_of

_START, _CHANNEL, _MESSAGE, _CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
_ENDS = ("<|end|>", "<|return|>", "<|call|>")
_TAGS = (_START, _CHANNEL, _MESSAGE, *_ENDS)
_TO = "to=functions."
_MAX_HEADER = 512  # characters


def _read(tag: str, block: Block) -> Reads[str]:
    block.kind = "text"
    block.quiet = True  # a header that the output's end cuts off is dropped
    if tag in _ENDS:
        return ""
    header = tag if tag == _MESSAGE else tag + (yield from until(_MESSAGE, _MAX_HEADER))
    channel = header.partition(_CHANNEL)[2]
    name = header.partition(_TO)[2].partition("<")[0].partition(" ")[0]
    block.settle()
    if not name:
        block.kind = "reasoning" if channel.startswith("analysis") else "text"
        return ""
    block.quiet = False
    char = yield from skip_space()
    if char == "{":
        block.start(name)
    yield from arguments(block, char)
    return ""


def _reasons(prompt: str) -> bool:
    last = prompt.rpartition(_START)[2]
    return last.rpartition(_CHANNEL)[2].startswith("analysis" + _MESSAGE) and not any(end in last for end in _ENDS)


def _spell(tools: Tools, several: bool) -> CallRules:
    """One call: a turn ends with its first."""
    header = ["mark0", literal(f"commentary {_TO}"), "name", literal(" "), "mark1", literal("json"), "mark2"]
    rules = [*one_of("calls", [*header, "arguments"], tools), *argument_schemas(tools)]
    return CallRules(rules, (_CHANNEL, _CONSTRAIN, _MESSAGE))


def _is_shown(template: str) -> bool:
    return _CHANNEL in template and _MESSAGE in template


HARMONY = Family(
    calls=Grammar(_read, (_TO,), _TAGS, _TAGS, (_CONSTRAIN,), _reasons),
    spell=_spell,
    shows_calls=_is_shown,
    reasoning=("<|channel|>analysis<|message|>", "<|end|><|start|>assistant"),
    shows_reasoning=_is_shown,
    answer="<|channel|>final<|message|>",
)
