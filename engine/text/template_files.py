"""The chat templates in a model's folder, and what they show of how the model writes.

Templates are searched for the tags that a family of models is taught. Knows neither jinja nor tokenizers, so that the
command line can ask before any process starts.
"""

from contextlib import suppress
from pathlib import Path

from ...config.config import ReasoningParser, ToolCallParser
from ...config.model_files import read_object, read_text
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
_MAX_CHARS = 1 << 20  # of a template; the longest have a twentieth
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
    templates = _read(folder, operator_file)
    for name, source in templates.items():
        if len(source) > _MAX_CHARS:
            whose = operator_file or folder
            raise ConfigError(f"The chat template {name!r} of {whose} has more than {_MAX_CHARS:,} characters.")
    return templates


def _read(folder: Path, operator_file: Path | None) -> dict[str, str]:
    if operator_file is not None:
        try:
            return {"default": read_text(operator_file)}
        except FileNotFoundError:
            raise ConfigError(f"There is no chat template {operator_file}.") from None
    more = {path.stem: read_text(path) for path in sorted((folder / "additional_chat_templates").glob("*.jinja"))}
    with suppress(FileNotFoundError):
        return {"default": read_text(folder / "chat_template.jinja"), **more}
    for name in ("chat_template.json", "tokenizer_config.json"):
        match (read_object(folder / name) or {}).get("chat_template"):
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
