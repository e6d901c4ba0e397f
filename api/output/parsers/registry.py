"""Finds the families that flags name and that chat templates show. A family's file is imported when first needed."""

from functools import cache

from ....config.families import REASONING_PARSERS, TOOL_CALL_PARSERS
from ....config.plugins import find_class
from ....errors import ConfigError
from .family import NO_CALLS, Family
from .lexer import Grammar

_TABLES = {"--tool-call-parser": TOOL_CALL_PARSERS, "--reasoning-parser": REASONING_PARSERS}


def _load(flag: str, name: str) -> Family:
    target = _TABLES[flag].get(name, name)
    if ":" not in target:
        known = ", ".join(sorted(_TABLES[flag]))
        raise ConfigError(f"{flag} {name!r} is not known; there are {known}, or write module:FAMILY.")
    if target.startswith("."):
        target = f"{__package__}.families{target}"
    found = find_class(flag, target, ())
    if not isinstance(found, Family):
        raise ConfigError(f"{flag} {name}: this is not a Family of pagewire.api.output.parsers.family.")
    part = "calls" if flag == "--tool-call-parser" else "reasoning"
    if name != "none" and getattr(found, part) in (None, NO_CALLS):
        raise ConfigError(f"{flag} {name}: this family has no {part}.")
    return found


@cache
def find_family(tool_call_parser: str, reasoning_parser: str) -> Family:
    """How the model writes calls and reasoning. The names are those of `EngineConfig`. Raises ConfigError."""
    calls, reasoning = _load("--tool-call-parser", tool_call_parser), _load("--reasoning-parser", reasoning_parser)
    for family in (calls, reasoning):
        if family.answer:
            return family
    return calls._replace(reasoning=reasoning.reasoning, answer_tags=reasoning.answer_tags)


@cache
def find_grammar(tool_call_parser: str, reasoning_parser: str, has_tools: bool) -> Grammar | None:
    """What to read an output with; None if all of it is text."""
    return find_family(tool_call_parser, reasoning_parser).grammar(has_tools)


def check(tool_call_parser: str, reasoning_parser: str) -> None:
    """Raises ConfigError if one of the flags, which may be auto, names no family."""
    find_family(*("none" if name == "auto" else name for name in (tool_call_parser, reasoning_parser)))


def shown_parsers(template: str) -> tuple[str, str]:
    """The names of the first families that recognize a chat template, for calls and for reasoning. Where none does, the
    model most likely writes calls as hermes."""
    calls = (name for name in TOOL_CALL_PARSERS if _load("--tool-call-parser", name).shows_calls(template))
    reasoning = (name for name in REASONING_PARSERS if _load("--reasoning-parser", name).shows_reasoning(template))
    return next(calls, "hermes"), next(reasoning, "none")
