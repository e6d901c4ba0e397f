"""The chat templates in a model's folder or GGUF file, as text. The command line reads them before any process starts,
so this needs neither jinja nor tokenizers.
"""

from contextlib import suppress
from pathlib import Path

from ...config.model_files import read_object, read_text
from ...errors import ConfigError
from ..checkpoint.files_digest import MORE_TEMPLATES
from ..checkpoint.gguf import Metadata, is_gguf, read_gguf

_MAX_CHARS = 1 << 20  # of a template; the longest that are known have a twentieth


def read_templates(folder: Path, operators: str | None = None) -> dict[str, str]:
    """Name → template of the checkpoint in `folder`, or the `operators` instead (--chat-template: a
    file or the template itself); empty if there are none. Raises
    ConfigError if one is damaged."""
    templates = _read(folder, operators)
    for name, source in templates.items():
        if len(source) > _MAX_CHARS:
            place = folder if operators is None else "--chat-template"
            raise ConfigError(f"The chat template {name!r} of {place} has more than {_MAX_CHARS:,} characters.")
    return templates


def _read(folder: Path, operators: str | None) -> dict[str, str]:
    if operators is not None:
        if "{{" in operators or "{%" in operators:
            return {"default": operators}
        try:
            return {"default": read_text(Path(operators))}
        except FileNotFoundError:
            raise ConfigError(f"There is no chat template {operators}.") from None
    if is_gguf(folder):
        return _of_gguf(read_gguf(folder, has_vocabulary=False).metadata)
    more = {path.stem: read_text(path) for path in sorted(folder.glob(MORE_TEMPLATES))}
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


def _of_gguf(metadata: Metadata) -> dict[str, str]:
    prefix = "tokenizer.chat_template"
    keys = [key for key in metadata.entries if key == prefix or key.startswith(f"{prefix}.")]
    return {key[len(prefix) + 1 :] or "default": metadata.text(key) or "" for key in keys}
