"""The tokens for infilling in a checkpoint's tokenizer files."""

import json
from pathlib import Path

import pytest

from pagewire.config.config import Infill
from pagewire.engine.text.infill import read_infill

QWEN = ["<|endoftext|>", "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<|fim_pad|>", "<|file_sep|>"]


def write(folder: Path, tokens: list[str], *, listed: bool) -> None:
    """A tokenizer with these special tokens, whose ids begin at 100."""
    added = [{"id": 100 + i, "content": text} for i, text in enumerate(tokens)]
    (folder / "tokenizer.json").write_text(json.dumps({"added_tokens": added, "model": {"vocab": {}}}))
    decoder = {str(entry["id"]): {"content": entry["content"]} for entry in added}
    (folder / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": decoder} if listed else {}))


@pytest.mark.parametrize("listed", [True, False])
def test_the_tokens_of_qwen(tmp_path: Path, listed: bool) -> None:
    write(tmp_path, QWEN, listed=listed)
    assert read_infill(tmp_path) == Infill(
        prefix="<|fim_prefix|>",
        suffix="<|fim_suffix|>",
        middle="<|fim_middle|>",
        stop_ids=(100, 104, 105),
        file="<|file_sep|>",
    )


def test_codestral_begins_with_the_suffix(tmp_path: Path) -> None:
    write(tmp_path, ["[SUFFIX]", "[PREFIX]"], listed=True)
    assert read_infill(tmp_path) == Infill(prefix="[PREFIX]", suffix="[SUFFIX]", middle="", is_suffix_first=True)


def test_other_tokenizers_have_none(tmp_path: Path) -> None:
    assert read_infill(tmp_path) is None
    write(tmp_path, ["<|endoftext|>", "<|fim_prefix|>"], listed=True)
    assert read_infill(tmp_path) is None
    (tmp_path / "tokenizer_config.json").unlink()
    (tmp_path / "tokenizer.json").write_text("not json")
    assert read_infill(tmp_path) is None
