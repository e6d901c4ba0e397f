"""The worker half of the disk and shared tiers, which reads and writes the files."""

import logging
import os
import resource
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from kv_instance import BLOCK_BYTES, FILE_BYTES, SIZE, Instance, sequence

from pagewire.engine.core.kv_connector import KvEvent
from pagewire.engine.kv_connector.file_worker import FileWorker

from .test_disk import KINDS, block_files, spec


@pytest.fixture
def small_files() -> Iterator[None]:
    """No file may grow beyond half a block, as if the disk were full."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (FILE_BYTES // 2, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    signal.signal(signal.SIGXFSZ, handler)


@KINDS
@pytest.mark.parametrize("damage", ["missing", "short", "flipped", "foreign", "pipe"])
def test_the_block_of_a_damaged_file_is_computed_and_stored_again(kind: str, damage: str, tmp_path: Path) -> None:
    engine = Instance(spec(kind, tmp_path))
    first = sequence(1, (1, 6 * SIZE + 1))
    engine.serve(first)
    engine.fill_device(2)
    engine.wait_until_written()
    (path,) = tmp_path.rglob(f"{first.keys[2].hex()}.*")
    whole = path.read_bytes()
    again = sequence(3, (1, 6 * SIZE + 1))
    assert engine.core.get_num_new_matched_tokens(again, 0)[0] == 6 * SIZE
    match damage:
        case "missing":
            path.unlink()
        case "short":
            path.write_bytes(whole[:-1])
        case "flipped":
            path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
        case "foreign":
            path.write_bytes(next(tmp_path.rglob(f"{first.keys[3].hex()}.*")).read_bytes())
        case "pipe":
            path.unlink()
            os.mkfifo(path)
    engine.core.take_events()
    assert engine.serve(again) == 5
    assert engine.failed == [first.keys[2]]
    assert KvEvent(False, (first.keys[2],), kind) in engine.core.take_events()
    engine.wait_until_written()
    assert path.read_bytes() == whole, "the computed block is stored again"
    engine.fill_device(4)
    assert engine.serve(sequence(5, (1, 6 * SIZE + 1))) == 6
    engine.close()


def test_partial_files_are_removed(tmp_path: Path) -> None:
    engine = Instance(spec("disk", tmp_path))
    engine.serve(sequence(1, (1, 2 * SIZE)))
    engine.close()
    part = block_files(tmp_path)[0].parent / ".part.1.2"
    part.write_bytes(b"half")
    engine = Instance(spec("disk", tmp_path))
    assert engine.core.tiers()[0].num_blocks == 2
    engine.close()
    assert not part.exists()


def test_blocks_that_wait_to_be_written_can_be_loaded(tmp_path: Path) -> None:
    engine = Instance(spec("disk", tmp_path))
    first = sequence(1, (1, 4 * SIZE + 1))
    engine.serve(first)
    engine.wait_until_written()
    assert isinstance(engine.worker, FileWorker)
    path = next(tmp_path.rglob(f"{first.keys[0].hex()}.*"))
    data = memoryview(path.read_bytes())[-BLOCK_BYTES:]
    path.unlink()
    engine.worker._writer._pending[first.keys[0]] = data  # as if it still waited to be written
    engine.fill_device(2)
    assert engine.serve(sequence(3, (1, 4 * SIZE + 1))) == 4
    engine.close()


@KINDS
@pytest.mark.usefixtures("small_files")
def test_a_full_disk_stores_nothing_and_warns_once(kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        engine = Instance(spec(kind, tmp_path))
        first = sequence(1, (1, 4 * SIZE + 1))
        engine.serve(first)
        engine.wait_until_written()
        assert block_files(tmp_path) == [], "no partial file is left"
        engine.fill_device(2)
        assert engine.serve(sequence(3, (1, 4 * SIZE + 1))) == 0
        engine.close()
    assert engine.failed == (first.keys[:4] if kind == "disk" else [])
    assert caplog.text.count("blocks cannot be written") == 1
