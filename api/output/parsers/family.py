"""What a family of models is: how it writes tool calls and reasoning, and how its chat template shows that.

A family is a file of `families` and its names in the table `config.families`, or a `Family` in a module of the
operator's that a flag names.
"""

from collections.abc import Callable
from typing import NamedTuple

from .block import Block, Kind, Reads, is_call_name
from .lexer import Grammar
from .spelling import CallRules, CannotSpell, Tools

Speller = Callable[[Tools, bool], CallRules]
"""The tools, and whether several may be called → rules for calls of any of them. Raises CannotSpell."""


def _read_nothing(tag: str, block: Block) -> Reads[str]:
    yield from ()
    return ""


NO_CALLS = Grammar(_read_nothing)


class Family(NamedTuple):
    """One way to write tool calls, to mark reasoning, or both; a flag takes only the part that it is for."""

    calls: Grammar = NO_CALLS
    spell: Speller | None = None  # None: calls cannot be forced
    shows_calls: Callable[[str], bool] = lambda template: False  # whether a chat template makes models write such calls
    reasoning: tuple[str, str] | None = None  # the strings that begin and end reasoning
    answer_tags: tuple[str, str] | None = None  # the strings around an answer that follows reasoning
    shows_reasoning: Callable[[str], bool] = lambda template: False
    # Begins an answer, in a family whose whole output is messages: `calls` then reads all of it, with or without tools,
    # and either flag selects the family for both.
    answer: str = ""

    def grammar(self, has_tools: bool) -> Grammar | None:
        """What to read an output with; None if all of it is text."""
        calls = self.calls if has_tools or self.answer else NO_CALLS
        if self.reasoning is not None and not self.answer:
            return _thinking(self.reasoning, self.answer_tags, calls)
        return None if calls is NO_CALLS else calls

    def spell_calls(self, tools: Tools, *, several: bool) -> CallRules | None:
        """Rules for calls of any of `tools`; None if calls cannot be forced. Raises CannotSpell."""
        for name, _ in tools:
            if not is_call_name(name):
                raise CannotSpell(f"{name[:80]!r} is not a name that a call can have", "name")
        return None if self.spell is None else self.spell(tools, several)


def _thinking(reasoning: tuple[str, str], answer: tuple[str, str] | None, calls: Grammar) -> Grammar:
    """Reasoning between two tags before the answer, which may stand between two tags, too; the prompt may end with the
    first. In the answer, `calls`."""
    kinds: dict[str, Kind] = {reasoning[0]: "reasoning", reasoning[1]: "text"}
    if answer is not None:
        kinds |= {answer[0]: "answer", answer[1]: "text"}

    def read(tag: str, block: Block) -> Reads[str]:
        if tag not in kinds:
            return calls.read(tag, block)
        block.kind = kinds[tag]
        return _read_nothing(tag, block)

    def reasons(prompt: str) -> bool:
        return prompt.rstrip().endswith(reasoning[0].rstrip())  # further back it may be what a user wrote

    leads = (reasoning[0], *((answer[0],) if answer else ()), *calls.leads)
    ends = (answer[1],) if answer else ()
    tag, _, more = reasoning[0].partition(">")
    return calls._replace(
        read=read,
        leads=leads,
        reasoning_tags=reasoning[1:],
        answer_tags=ends,
        marks=(*calls.marks, tag + ">") if more else calls.marks,  # what is a special token of the first string
        reasons=reasons,
    )
