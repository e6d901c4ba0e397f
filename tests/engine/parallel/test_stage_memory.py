"""What a stage leaves for the next one in memory that both share."""

import os

import pytest

from pagewire.engine.parallel.shared_memory import make_memory
from pagewire.engine.parallel.stage_memory import StageMemory


def test_the_other_side_reads_what_is_left_in_a_slot() -> None:
    fd = make_memory("pagewire-stages")
    sender = StageMemory(os.dup(fd), num_slots=3, slot_bytes=100)
    receiver = StageMemory(fd, num_slots=3, slot_bytes=100)
    with pytest.raises(OSError):
        os.fstat(fd)  # the mapping is enough
    for step in range(4, 7):  # plans in flight at once
        sender.slot(step, 100)[:] = bytes([step]) * 100
    assert [bytes(receiver.slot(step, 50)) for step in range(4, 7)] == [bytes([step]) * 50 for step in range(4, 7)]
    sender.slot(7, 10)[:] = b"0123456789"  # when that of plan 4 was read
    assert bytes(receiver.slot(7, 10)) == bytes(receiver.slot(4, 10)) == b"0123456789"
    assert bytes(receiver.slot(5, 100)) == b"\5" * 100
    with pytest.raises(AssertionError):
        sender.slot(8, sender.slot_bytes + 1)
