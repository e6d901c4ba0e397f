"""Malformed safetensors files: the header is checked, by itself and against the file, before the file is mapped."""

import json
import os
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from pagewire.engine.checkpoint.header import check_header
from pagewire.errors import CheckpointError

GOOD = {"a": ("F32", [2, 3], [0, 24]), "b": ("BF16", [4], [24, 32]), "empty": ("I64", [0, 7], [32, 32])}


def _write(path: Path, header: object, data: bytes = bytes(32), length: int | None = None) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)
    return path


def _described(**changes: Any) -> dict[str, object]:
    names = ("dtype", "shape", "data_offsets")
    return {name: dict(zip(names, value, strict=True)) for name, value in (GOOD | changes).items() if value}


def test_valid_files_are_accepted(tmp_path: Path) -> None:
    tensors = {"x": torch.ones(3, 5), "y": torch.zeros(7, dtype=torch.float8_e4m3fn), "z": torch.ones(0)}
    save_file(tensors, tmp_path / "m.safetensors", metadata={"format": "pt"})
    check_header(tmp_path / "m.safetensors")
    check_header(_write(tmp_path / "good", _described()))
    check_header(_write(tmp_path / "padded", json.dumps(_described()).encode() + b"   "))
    (tmp_path / "link").symlink_to("good")  # as in a Hub cache
    check_header(tmp_path / "link")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"a": ("F32", [2, 4], [0, 24])}, "a is F32 [2, 4], which takes 32 bytes, but has 24"),
        ({"a": ("F64", [2, 3], [0, 24])}, "a is F64"),
        ({"a": ("F32", [2**40, 2**40], [0, 24])}, "a is F32"),
        ({"a": ("F32", [-2, -3], [0, 24])}, "describes a wrongly"),
        ({"a": ("F32", [2, 3], [24, 0])}, "a is F32"),
        ({"a": ("F32", [2, 3], [-24, 0])}, "describes a wrongly"),
        ({"a": ("F32", [2, 3], [0, 2**70])}, "describes a wrongly"),
        ({"a": ("F32", "ab", [0, 24])}, "describes a wrongly"),
        ({"a": ("PICKLE", [2, 3], [0, 24])}, "a in PICKLE, a type that pagewire does not read"),
        ({"a": ("F32", [1] * 9 + [6], [0, 24])}, "a has 10 dimensions"),
        ({"b": ("BF16", [4], [8, 16])}, "the bytes of b overlap those of another tensor"),
        ({"b": ("BF16", [4], [26, 34])}, "the bytes of b leave a gap of 2 before them"),
        ({"c": ("F32", [1000], [32, 4032])}, "it holds 32 bytes of tensors, and its header names 4,032"),
        ({"b": None}, "it holds 32 bytes of tensors, and its header names 24"),
    ],
)
def test_headers_that_do_not_match_the_file_are_refused(tmp_path: Path, changes: dict[str, object], words: str) -> None:
    path = _write(tmp_path / "m.safetensors", _described(**changes))
    if changes == {"b": None}:
        path = _write(path, {"a": _described()["a"]})
    with pytest.raises(CheckpointError) as caught:
        check_header(path)
    assert words in str(caught.value) and str(path) in str(caught.value)


@pytest.mark.parametrize(
    ("header", "length", "words"),
    [
        (b'{"a": 1}', None, "describes a wrongly"),
        (b"[]", None, "no valid JSON"),
        (b'{"a": ' * 10_000, None, "no valid JSON"),
        (b'{"__metadata__": {"x": 1}}', None, "no valid JSON"),
        (b'{"a\xff": {}}', None, "no valid JSON"),
        (b"{}", 2**63, "do not hold its header"),
        (b"{}", 30, "no valid JSON"),
        (json.dumps(_described()).encode()[:-1] + b"," + json.dumps(_described()).encode()[1:], None, "names a twice"),
    ],
)
def test_malformed_headers_are_refused(tmp_path: Path, header: bytes, length: int | None, words: str) -> None:
    with pytest.raises(CheckpointError, match=words):
        check_header(_write(tmp_path / "m.safetensors", header, length=length))


def test_a_header_that_is_too_large_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    path.write_bytes(struct.pack("<Q", 200_000_000))
    os.truncate(path, 300_000_000)  # a sparse file, which takes no disk space
    with pytest.raises(CheckpointError, match=r"has 200,000,000 bytes; 100,000,000 are allowed"):
        check_header(path)


def test_paths_that_are_not_regular_files_are_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "pipe", Path("/dev/zero")):
        with pytest.raises(CheckpointError, match="not a regular file"):
            check_header(path)
    (tmp_path / "m").write_bytes(b"1234")
    with pytest.raises(CheckpointError, match="do not hold its header"):
        check_header(tmp_path / "m")
