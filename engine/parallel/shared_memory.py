"""The memory that the ranks of one machine share: how they get it, meet in it, and notice that one of them has ended.

The supervisor makes a memfd and lets the ranks inherit it. A memfd has no name, so its memory is free when the last
process that has it ends, however the processes end. It needs no room in /dev/shm, of which a container has 64 MB.

Each rank locks one byte of the file for as long as it lives. The kernel releases the locks of a process that ends, so a
rank that can lock the byte of another one knows that this one has ended.
"""

import ctypes
import fcntl
import mmap
import os
import time
from collections.abc import Callable

from ...errors import StartError

_HEADER = 4096  # 32-bit words, one for each rank: how it arrived; then how often it was at a gate
_ARRIVED, _UNABLE = 1, 2
_POLL_S = 0.001


def make_memory(name: str = "pagewire-ranks") -> int:
    """A descriptor for ranks to inherit, which the caller closes; -1 where the system has no memfd."""
    return os.memfd_create(name) if hasattr(os, "memfd_create") else -1


class SharedMemory:
    """This rank's view of it; one object for each process. It takes ownership of the descriptor.

    When the object is dropped, the others take this rank for ended: a process loses its locks when it closes any
    descriptor of the file, and the mapping has one."""

    def __init__(self, fd: int, *, rank: int, size: int, num_bytes: int) -> None:
        """num_bytes: all zero at first, at `address`. The same on every rank. Raises OSError if there is too little
        memory for the mapping."""
        assert 2 * size <= _HEADER // 4, size
        self._fd, self._rank, self._size = fd, rank, size
        os.ftruncate(fd, _HEADER + num_bytes)
        self._map = mmap.mmap(fd, _HEADER + num_bytes)
        self._words = memoryview(self._map).cast("I")
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._map)) + _HEADER
        fcntl.lockf(fd, fcntl.LOCK_EX, 1, rank)

    def meet(self, *, is_able: bool, timeout_s: float) -> bool:
        """Waits for all ranks. Whether all of them are able. Raises StartError if one ends or does not come in time."""
        self._words[self._rank] = _ARRIVED if is_able else _UNABLE
        deadline = time.monotonic() + timeout_s
        while missing := [rank for rank in range(self._size) if not self._words[rank]]:
            if (ended := self.ended()) is not None:
                raise StartError(f"The {self._size} ranks did not meet: rank {ended} has ended.")
            if time.monotonic() > deadline:
                raise StartError(f"The {self._size} ranks did not meet: rank {missing[0]} did not come.")
            time.sleep(_POLL_S)
        return all(self._words[rank] == _ARRIVED for rank in range(self._size))

    def pass_gate(self, gives_up: Callable[[], bool]) -> bool:
        """Waits until all ranks have called this equally often. gives_up: asked while they have not, whether to wait no
        longer; then the answer is False."""
        own = self._size + self._rank
        self._words[own] = number = (self._words[own] + 1) & 0xFFFFFFFF
        while any((self._words[self._size + rank] - number) & 0x80000000 for rank in range(self._size)):
            if gives_up():
                return False
            time.sleep(_POLL_S)
        return True

    def ended(self) -> int | None:
        """A rank that was there and has ended."""
        for rank in range(self._size):
            if rank != self._rank and self._words[rank]:
                try:
                    fcntl.lockf(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, rank)
                except OSError:  # it holds the lock
                    continue
                fcntl.lockf(self._fd, fcntl.LOCK_UN, 1, rank)  # for the other ranks to see it, too
                return rank
        return None
