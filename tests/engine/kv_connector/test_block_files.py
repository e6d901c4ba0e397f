"""Block files: a read gives exactly the bytes that were written, or fails."""

import os
import random
from pathlib import Path

import pytest

from pagewire.engine.core.kv_connector import Item
from pagewire.engine.kv_connector.base import ConnectorFacts
from pagewire.engine.kv_connector.block_files import BlockFiles, is_part
from pagewire.engine.kv_connector.block_storage import HEADER_BYTES, BadBlock
from pagewire.errors import ConfigError

MODEL = b"m" * 32
KEY = bytes(range(32))
DATA = random.Random(1).randbytes(96)


def files_in(path: Path, model: bytes = MODEL, num_bytes: int = len(DATA)) -> BlockFiles:
    files = BlockFiles(path=str(path), facts=ConnectorFacts(block_size=4, block_bytes=num_bytes, model_key=model))
    files.open("disk")
    return files


def read(files: BlockFiles, key: bytes = KEY, place: int = 3) -> bytes:
    into = bytearray(len(DATA))
    files.read(Item(key, place), memoryview(into))
    return bytes(into)


def test_a_block_is_read_as_it_was_written(tmp_path: Path) -> None:
    files = files_in(tmp_path / "new" / "folder")
    assert not files.has(Item(KEY, 3))
    files.write(Item(KEY, 3), memoryview(DATA))
    files.write(Item(KEY, 3), memoryview(DATA))
    assert files.has(Item(KEY, 3)) and not files.has(Item(KEY, 4))
    assert read(files) == DATA
    assert (tmp_path / "new" / "folder").stat().st_mode & 0o777 == 0o700
    (found,) = files.scan()
    assert (found.item, found.place, found.size) == (Item(KEY, 3), 3, HEADER_BYTES + len(DATA))
    files.touch(Item(KEY, 3), 123_456_789)
    assert next(files.scan()).used_ns == 123_456_789
    files.remove(files.name(Item(KEY, 3)))
    files.remove(files.name(Item(KEY, 3)))
    files.touch(Item(KEY, 3), 1)
    assert list(files.scan()) == []
    with pytest.raises(BadBlock):
        read(files)


def test_a_change_of_any_byte_is_detected(tmp_path: Path) -> None:
    files = files_in(tmp_path)
    files.write(Item(KEY, 3), memoryview(DATA))
    path = tmp_path / files.name(Item(KEY, 3))
    whole = path.read_bytes()
    assert len(whole) == files.file_bytes()
    for i in range(len(whole)):
        path.write_bytes(whole[:i] + bytes([whole[i] ^ 0x10]) + whole[i + 1 :])
        with pytest.raises(BadBlock):
            read(files)
    for size in (0, 1, HEADER_BYTES - 1, HEADER_BYTES, len(whole) - 1):
        path.write_bytes(whole[:size])
        assert not files.has(Item(KEY, 3))
        with pytest.raises(BadBlock, match="bytes instead of"):
            read(files)
    path.write_bytes(whole + b"x")
    with pytest.raises(BadBlock):
        read(files)
    path.write_bytes(whole)
    assert read(files) == DATA


def test_a_valid_file_under_another_key_or_of_another_model_is_refused(tmp_path: Path) -> None:
    files, others = files_in(tmp_path), files_in(tmp_path, b"n" * 32)
    files.write(Item(KEY, 3), memoryview(DATA))
    source = tmp_path / files.name(Item(KEY, 3))
    for owner, key in ((files, bytes(32)), (others, KEY)):
        target = tmp_path / owner.name(Item(key, 3))
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(source.read_bytes())
        with pytest.raises(BadBlock, match="checksum"):
            read(owner, key)
    assert not files_in(tmp_path, b"o" * 32).has(Item(KEY, 3))


@pytest.mark.parametrize("kind", ["pipe", "folder", "link", "dangling"])
def test_only_regular_files_are_read(tmp_path: Path, kind: str) -> None:
    files = files_in(tmp_path)
    path = tmp_path / files.name(Item(KEY, 3))
    path.parent.mkdir(parents=True)
    match kind:
        case "pipe":
            os.mkfifo(path)
        case "folder":
            path.mkdir()
        case "link":
            files.write(Item(bytes(32), 3), memoryview(DATA))
            path.symlink_to(tmp_path / files.name(Item(bytes(32), 3)))
        case "dangling":
            path.symlink_to(tmp_path / "nowhere")
    with pytest.raises(BadBlock):
        read(files)


def test_a_write_that_fails_leaves_nothing(tmp_path: Path) -> None:
    files = files_in(tmp_path)
    path = tmp_path / files.name(Item(KEY, 3))
    (path / "in the way").mkdir(parents=True)
    with pytest.raises(OSError, match="directory"):
        files.write(Item(KEY, 3), memoryview(DATA))
    assert [p.name for p in path.parent.iterdir()] == [path.name]


def test_the_scan_ignores_foreign_files(tmp_path: Path) -> None:
    files, others = files_in(tmp_path), files_in(tmp_path, b"n" * 32, 40)
    files.write(Item(KEY, 3), memoryview(DATA))
    others.write(Item(KEY, 1), memoryview(DATA[:40]))
    (tmp_path / "README").write_text("mine")
    (tmp_path / "photos" / "aa").mkdir(parents=True)
    (tmp_path / "photos" / "aa" / "1.jpg").write_text("mine")
    folder = (tmp_path / files.name(Item(KEY, 3))).parent
    for name in (f".{KEY.hex()}.3.1.2", f"{KEY.hex()}.x", f"{KEY.hex()}.²", KEY.hex()[:-2] + ".1", "ff" * 32 + ".0"):
        (folder / name).write_bytes(b"?" * files.file_bytes())
    (folder / f"{KEY.hex()}.9").write_bytes(b"short")
    found = list(files.scan())
    assert [f.item for f in found if f.item] == [Item(KEY, 3)]
    assert len(found) == 8
    assert sum(is_part(f.name) for f in found) == 1


def test_a_path_that_is_not_a_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"--kv-connector disk,path=.*/file: this folder cannot be written to"):
        files_in(tmp_path / "file")
    with pytest.raises(ConfigError):
        files_in(tmp_path / "file" / "below")
