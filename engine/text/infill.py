"""The special tokens with which a checkpoint's tokenizer marks the places of an infilling. The command line reads them
before any process starts, so this needs no tokenizer."""

from pathlib import Path

import msgspec

from ...config.config import Infill
from ...config.model_files import read_object, read_text
from ..checkpoint.gguf import is_gguf

# Before the first text, before the last one, before what the model writes; and whether the last text comes first.
_MARKS = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", False),
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>", False),
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>", False),
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>", False),
    ("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>", False),
    ("▁<PRE>", "▁<SUF>", "▁<MID>", False),
    ("[PREFIX]", "[SUFFIX]", "", True),
)
_STOPS = frozenset(
    {
        "<|fim_pad|>", "<fim_pad>", "<fim-pad>", "<|endoftext|>", "<EOT>", "▁<EOT>",
        "<|repo_name|>", "<reponame>", "<|file_sep|>", "<|file_separator|>", "<file_sep>",
    }
)  # fmt: skip
_FILES = ("<|file_sep|>", "<|file_separator|>", "<file_sep>")


class _AddedToken(msgspec.Struct, frozen=True):
    id: int
    content: str


class _TokenizerFile(msgspec.Struct, frozen=True):
    """The part of tokenizer.json that matters here."""

    added_tokens: list[_AddedToken] = []


def read_infill(folder: Path) -> Infill | None:
    """None if the checkpoint has no tokens for it; so far those of GGUF files are not read. Raises ConfigError if a
    file cannot be read."""
    if is_gguf(folder):
        return None
    ids = _added_tokens(folder)
    for prefix, suffix, middle, is_suffix_first in _MARKS:
        if all(mark in ids for mark in (prefix, suffix, middle) if mark):
            return Infill(
                prefix=prefix,
                suffix=suffix,
                middle=middle,
                is_suffix_first=is_suffix_first,
                stop_ids=tuple(sorted(ids[text] for text in _STOPS & ids.keys())),
                file=next((text for text in _FILES if text in ids), ""),
            )
    return None


def _added_tokens(folder: Path) -> dict[str, int]:
    """Text → id."""
    listed = (read_object(folder / "tokenizer_config.json") or {}).get("added_tokens_decoder")
    if isinstance(listed, dict):
        return {
            str(entry["content"]): int(id)
            for id, entry in listed.items()
            if id.isdecimal() and isinstance(entry, dict) and "content" in entry
        }
    try:
        file = msgspec.json.decode(read_text(folder / "tokenizer.json"), type=_TokenizerFile)
    except (FileNotFoundError, msgspec.MsgspecError):  # loading the tokenizer says what is wrong
        return {}
    return {token.content: token.id for token in file.added_tokens}
