"""The digest of a model's files is the same for copies, and another for other files."""

import json
import os
import shutil
from pathlib import Path

import checkpoints
import gguf_files
import pytest

from pagewire.engine.checkpoint.files_digest import files_digest
from pagewire.engine.checkpoint.spec import fingerprint, model_facts, read_spec
from pagewire.errors import ConfigError


def test_copies_have_the_same_digest_and_other_files_another(tmp_path: Path) -> None:
    original = checkpoints.make_checkpoint(tmp_path / "a", "llama")
    copy = tmp_path / "b"
    shutil.copytree(original, copy)
    weights = copy / "model.safetensors"
    os.utime(weights, (1, 1))
    (copy / "README.md").write_text("x")
    digests = [files_digest(original)]
    assert files_digest(copy) == digests[0] != fingerprint(copy) and len(bytes.fromhex(digests[0])) == 32
    assert model_facts(read_spec(copy), copy, "m").files_digest == digests[0]
    data = weights.read_bytes()

    def expect_change() -> None:
        digests.append(files_digest(copy))
        assert len({*digests}) == len(digests)

    tuned = len(data) // 32  # the samples lie less than that apart
    weights.write_bytes(data[:-tuned] + b"\1" * tuned)  # another fine-tune: the shapes are the same
    expect_change()
    weights.write_bytes(data[:20] + bytes([data[20] ^ 1]) + data[21:])  # in the header
    expect_change()
    weights.write_bytes(data + b"x")
    expect_change()
    (copy / "chat_template.jinja").write_text("{{ messages }}")
    expect_change()
    shutil.copytree(original, tmp_path / "adapter")
    shutil.copy(copy / "config.json", tmp_path / "adapter" / "adapter_config.json")
    digests.append(files_digest(copy, tmp_path / "adapter"))
    os.truncate(tmp_path / "adapter" / "model.safetensors", len(data) - 1)
    digests.append(files_digest(copy, tmp_path / "adapter"))
    assert len({*digests}) == len(digests)


@pytest.mark.parametrize(
    "name",
    [
        "tokenizer.model", "sentencepiece.bpe.model", "vocab.json", "vocab.txt", "merges.txt", "added_tokens.json",
        "special_tokens_map.json", "tiktoken.model", "additional_chat_templates/tool_use.jinja",
        "config_sentence_transformers.json", "sentence_bert_config.json", "modules.json", "1_Pooling/config.json",
        "pool/config.json",
    ],
)  # fmt: skip
def test_all_that_changes_prompts_or_vectors_counts(tmp_path: Path, name: str) -> None:
    folder = checkpoints.make_checkpoint(tmp_path / "a", "llama")
    parts = [{"type": "x.Pooling", "path": path} for path in ("", "1_Pooling", "pool", "away")]
    (folder / "modules.json").write_text(json.dumps(parts))
    digests = {files_digest(folder)}
    for end in (" ", "\n"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(json.dumps(parts) + end)
        digests.add(files_digest(folder))
    assert len(digests) == 3, "without it, with it, and with another one"
    assert files_digest(Path(shutil.copytree(folder, tmp_path / "b"))) in digests


def test_other_files_beside_the_model_are_not_read(tmp_path: Path) -> None:
    folder = checkpoints.make_checkpoint(tmp_path / "a", "llama")
    before = files_digest(folder)
    (folder / "trainer_state.json").write_text("{}")
    (folder / "LICENSE.txt").write_text("x")
    (folder / "old.model").mkdir()
    assert files_digest(folder) == before


def test_the_parts_of_a_gguf_file_count(tmp_path: Path) -> None:
    folder = checkpoints.make_checkpoint(tmp_path / "folder", "llama")
    whole = gguf_files.write_gguf(folder, tmp_path / "model.gguf")
    renamed = Path(shutil.copy(whole, tmp_path / "other.gguf"))
    assert files_digest(renamed) == files_digest(whole)
    first = gguf_files.write_gguf(folder, tmp_path / "model.gguf", split=20)
    before = files_digest(first)
    tuned = whole.stat().st_size // 32
    with open(first.with_name("model-00002-of-00002.gguf"), "r+b") as second:
        second.seek(-tuned, os.SEEK_END)
        second.write(b"\1" * tuned)
    assert len({files_digest(whole), before, files_digest(first)}) == 3


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    os.mkfifo(tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=r"model\.safetensors cannot be read"):
        files_digest(tmp_path)
