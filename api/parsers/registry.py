"""Which grammar belongs to which names of parsers. The names are vLLM's."""

from functools import cache

from .calls import DEEPSEEK, HERMES, LLAMA3_JSON, MISTRAL, NO_CALLS, PYTHONIC, thinking
from .harmony import HARMONY
from .lexer import Grammar

_CALLS = {
    "none": NO_CALLS,
    "hermes": HERMES,
    "llama3_json": LLAMA3_JSON,
    "mistral": MISTRAL,
    "pythonic": PYTHONIC,
    "deepseek_v3": DEEPSEEK,
    "deepseek_v31": DEEPSEEK,
    "openai": HARMONY,
}
_REASONING = {
    "deepseek_r1": ("<think>", "</think>"),
    "qwen3": ("<think>", "</think>"),
    "mistral": ("[THINK]", "[/THINK]"),
}


@cache
def find_grammar(tool_call_parser: str, reasoning_parser: str, has_tools: bool) -> Grammar | None:
    """What to read an answer with; None if it is words only. The names are those of `EngineConfig`."""
    if "openai" in (tool_call_parser, reasoning_parser) or reasoning_parser == "openai_gptoss":
        return HARMONY  # its messages have to be told apart in any case
    calls = _CALLS[tool_call_parser] if has_tools else NO_CALLS
    if reasoning_parser != "none":
        return thinking(*_REASONING[reasoning_parser], calls)
    return None if calls is NO_CALLS else calls
