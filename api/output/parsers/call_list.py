"""Calls as a JSON list, `[{"name": …, "arguments": {…}}, …]`, which several families write after tags of their own."""

from .block import Block, Broken, Reads, call_object, skip_space
from .spelling import literal, repeat


def call_list(block: Block) -> Reads[None]:
    """The calls after the list's opening bracket, and its closing one."""
    char = ""
    while char != "]":
        yield from call_object(block, (yield from skip_space()))
        char = yield from skip_space()
        if char not in ",]":
            raise Broken


def spell_call_list(several: bool) -> list[str]:
    """Parts of a rule: a list of one or several `object`s."""
    return [literal("["), repeat("object", ", ", several), literal("]")]
