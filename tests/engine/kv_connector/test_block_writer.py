"""Blocks that wait to be written."""

import logging
from pathlib import Path

import pytest
from kv_instance import BLOCK_BYTES, SIZE, Instance, sequence

from pagewire.engine.kv_connector.file_worker import FileWorker

from .test_disk import spec


def test_a_full_backlog_keeps_the_first_blocks_of_a_sequence(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    engine = Instance(spec("disk", tmp_path))
    assert isinstance(engine.worker, FileWorker)
    engine.worker._writer._max_bytes = 3 * BLOCK_BYTES
    first = sequence(1, (1, 8 * SIZE + 1))
    with caplog.at_level(logging.WARNING):
        engine.serve(first)
    assert "faster than they can be written" in caplog.text
    engine.fill_device(2)
    assert engine.serve(sequence(3, (1, 8 * SIZE + 1))) >= 3
    assert engine.failed == first.keys[3:8]
    engine.close()
