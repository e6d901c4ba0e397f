"""The chat templates in a model's folder, and what they show of how the model writes.

Templates are searched for the tags that a family of models is taught. Knows neither jinja nor tokenizers, so that the
command line can ask before any process starts.
"""

import json
from pathlib import Path

from ...config import ReasoningParser, ToolCallParser
from ...errors import ConfigError

# The first whose strings are all in the template. Those that other families' templates may also mention come last.
_CALLS: tuple[tuple[ToolCallParser, tuple[str, ...]], ...] = (
    ("openai", ("<|channel|>", "<|message|>")),
    ("mistral", ("[TOOL_CALLS]",)),
    ("deepseek_v3", ("<｜tool▁call▁begin｜>", "```json")),
    ("deepseek_v31", ("<｜tool▁call▁begin｜>",)),
    ("none", ("<tool_call>", "<function=")),  # Qwen3-Coder's, which only a tool's schema can read
    ("hermes", ("<tool_call>",)),
    ("pythonic", ("[func_name1(",)),
    ("llama3_json", ("<|python_tag|>",)),
    ("llama3_json", ('{"name": function name, "parameters":',)),
    ("pythonic", ("<|python_start|>",)),
)
_REASONING: tuple[tuple[ReasoningParser, tuple[str, ...]], ...] = (
    ("openai_gptoss", ("<|channel|>", "<|message|>")),
    ("mistral", ("[THINK]",)),
    ("deepseek_r1", ("</think>", "<｜Assistant｜>")),
    ("qwen3", ("</think>",)),
)


def tool_call_parser(template: str) -> ToolCallParser:
    """How a model with this template writes calls. One whose template shows nothing is likeliest to do as hermes."""
    return next((name for name, marks in _CALLS if all(mark in template for mark in marks)), "hermes")


def reasoning_parser(template: str) -> ReasoningParser:
    """How a model with this template marks its reasoning."""
    return next((name for name, marks in _REASONING if all(mark in template for mark in marks)), "none")


def read_templates(folder: Path, operator_file: Path | None = None) -> dict[str, str]:
    """Name → template of the checkpoint in `folder`, or `operator_file` instead. Raises ConfigError if one is damaged.
    Empty without any."""
    if operator_file is not None:
        return {"default": _read_text(operator_file)}
    more = {path.stem: _read_text(path) for path in sorted((folder / "additional_chat_templates").glob("*.jinja"))}
    if (folder / "chat_template.jinja").is_file():
        return {"default": _read_text(folder / "chat_template.jinja"), **more}
    for name in ("chat_template.json", "tokenizer_config.json"):
        match read_json(folder / name).get("chat_template"):
            case str(source):
                return {"default": source, **more}
            case list(entries):
                named = {
                    entry["name"]: entry["template"]
                    for entry in entries
                    if isinstance(entry, dict) and isinstance(entry.get("name"), str) and "template" in entry
                }
                return {name: str(source) for name, source in named.items()} | more
            case dict(entries):
                return {str(name): str(source) for name, source in entries.items()} | more
    return more


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"The chat template {path} cannot be read: {error}.") from None


def read_json(path: Path) -> dict[str, object]:
    """A JSON object from a model's folder; empty if there is no such file. Raises ConfigError if it is damaged."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is damaged: {error}.") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{path} is damaged: it holds no JSON object.")
    return value
