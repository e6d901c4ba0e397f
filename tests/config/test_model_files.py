"""Files of a model's folder that are not regular files, too large, or not JSON."""

import os
from pathlib import Path

import pytest

from pagewire.config import model_files
from pagewire.config.model_files import read_file, read_object, read_text
from pagewire.errors import ConfigError, PagewireError


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "truncated"),
        (b"[1]", "Expected `object`"),
        (b'{"a": 1} x', "trailing"),
        (b'{"a": NaN}', "malformed"),
        (b'{"a":' * 100_000, "nested too deeply"),
        (b'{"a": "\xff"}', "utf-8"),
    ],
)
def test_damaged_json_is_refused(tmp_path: Path, data: bytes, words: str) -> None:
    (tmp_path / "config.json").write_bytes(data)
    with pytest.raises(ConfigError, match=rf"config\.json is damaged: .*{words}"):
        read_object(tmp_path / "config.json")


def test_unreadable_files_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "text").write_bytes(b"caf\xe9")
    for path, words in (
        (tmp_path, "not a regular file"),
        (tmp_path / "pipe", "not a regular file"),  # without a writer
        (Path("/dev/zero"), "not a regular file"),
        (tmp_path / "loop", "symbolic links"),
        (tmp_path / "a\0b", "null byte"),
        (tmp_path / "text" / "x", "Not a directory"),
    ):
        with pytest.raises(ConfigError, match=words):
            read_file(path)
    with pytest.raises(ConfigError, match="text is not UTF-8: unexpected end of data at byte 3"):
        read_text(tmp_path / "text")
    assert read_object(tmp_path / "none") is None
    monkeypatch.setattr(model_files, "MAX_BYTES", 3)
    with pytest.raises(ConfigError, match="larger than"):
        read_file(tmp_path / "text")


def test_an_error_is_one_printable_line_of_bounded_length() -> None:
    error = PagewireError("no \x1b[2J\n\u202e\ud800 " + "x" * 100_000 + " end.")
    assert str(error).isprintable() and len(str(error)) < 1200
    assert str(error).startswith("no \\x1b[2J\\n\\u202e\\ud800 xxx") and str(error).endswith("x end.")
    assert str(PagewireError("Schön, 日本語.")) == "Schön, 日本語."
