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


_HARMONY_REASONING = ("<|channel|>analysis<|message|>", "<|end|><|start|>assistant")
HARMONY_ANSWER = "<|channel|>final<|message|>"


def writes_harmony(tool_call_parser: str, reasoning_parser: str) -> bool:
    """Whether the model's output is a row of messages."""
    return tool_call_parser == "openai" or reasoning_parser in ("openai", "openai_gptoss")


def reasoning_tags(tool_call_parser: str, reasoning_parser: str) -> tuple[str, str] | None:
    """What opens the model's reasoning, and what ends it; None if nothing is known of any."""
    if writes_harmony(tool_call_parser, reasoning_parser):
        return _HARMONY_REASONING
    return _REASONING.get(reasoning_parser)


@cache
def find_grammar(tool_call_parser: str, reasoning_parser: str, has_tools: bool) -> Grammar | None:
    """What to read an answer with; None if it is words only. The names are those of `EngineConfig`."""
    if writes_harmony(tool_call_parser, reasoning_parser):
        return HARMONY  # its messages have to be told apart in any case
    calls = _CALLS[tool_call_parser] if has_tools else NO_CALLS
    if reasoning_parser != "none":
        return thinking(*_REASONING[reasoning_parser], calls)
    return None if calls is NO_CALLS else calls
