"""The memory through which a worker hands its results to the next stage on the same machine.

It is divided into slots, one for each plan that may be in flight. No flags are needed: the core sends plan n when the
last stage has answered plan n − `num_slots`, and so every stage has read what it was handed for that plan. Messages say
when a slot is filled.
"""

import mmap
import os

_ALIGNMENT = 64


class StageMemory:
    def __init__(self, fd: int, *, num_slots: int, slot_bytes: int) -> None:
        """fd: of `shared_memory.make_memory`, which is closed. Both sides give the same numbers. Raises OSError."""
        self.slot_bytes = -(-slot_bytes // _ALIGNMENT) * _ALIGNMENT
        self._num_slots = num_slots
        try:
            os.ftruncate(fd, num_slots * self.slot_bytes)
            self._map = mmap.mmap(fd, num_slots * self.slot_bytes)
        finally:
            os.close(fd)

    def slot(self, step: int, num_bytes: int) -> memoryview:
        """The beginning of a step's slot."""
        assert num_bytes <= self.slot_bytes, (num_bytes, self.slot_bytes)
        first = step % self._num_slots * self.slot_bytes
        return memoryview(self._map)[first : first + num_bytes]
