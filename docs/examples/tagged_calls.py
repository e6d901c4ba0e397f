"""A family of models that writes `<call:name>{…}</call>` for a tool call and reasons in `<plan>…</plan>`.

    PYTHONPATH=docs/examples pagewire serve MODEL \\
      --tool-call-parser tagged_calls:FAMILY --reasoning-parser tagged_calls:FAMILY
"""

from pagewire.api.output.parsers.block import MAX_NAME, Block, Reads, arguments, closing, skip_space, until
from pagewire.api.output.parsers.family import Family
from pagewire.api.output.parsers.lexer import Grammar
from pagewire.api.output.parsers.spelling import CallRules, Tools, argument_schemas, literal, one_of, repeat, rule

OPEN, CLOSE = "<call:", "</call>"


def read(tag: str, block: Block) -> Reads[str]:
    """Reads one call; its arguments are sent to the client while they are read."""
    name = yield from until(">", MAX_NAME + 1)
    char = yield from skip_space()
    block.start(name)
    yield from arguments(block, char)
    yield from closing(CLOSE)
    return ""


def spell(tools: Tools, several: bool) -> CallRules:
    """The same calls as rules of a grammar, which forced calls follow. `mark0` is OPEN and `mark1` is CLOSE."""
    calls = rule("calls", repeat("call", "\n", several))
    call = one_of("call", ["mark0", "name", literal(">"), "arguments", "mark1"], tools)
    return CallRules([calls, *call, *argument_schemas(tools)], (OPEN, CLOSE))


FAMILY = Family(
    calls=Grammar(read, tags=(OPEN,), marks=(CLOSE,)),
    spell=spell,
    shows_calls=lambda template: OPEN in template,
    reasoning=("<plan>", "</plan>"),
    shows_reasoning=lambda template: "<plan>" in template,
)
