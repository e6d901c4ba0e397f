"""How fast this machine's memory can be read: measured once, in pieces of a few milliseconds while no request waits.

A piece is a product of a matrix of float32 and a vector, as in `bench/peers/with_floor.py`: one multiplication for each
four bytes that are read, on the threads that the steps use. All pieces together are larger than the caches. They are a
mapping of their own, which goes back to the system at the end and teaches malloc nothing.
"""

import mmap
import time
from pathlib import Path

import torch
from torch import Tensor

_COLUMNS = 4096  # long rows, so that a thread reads in one run
_PIECE = 8 << 20  # bytes
_ROUNDS = 3  # over all pieces; of each piece the fastest reading counts, since other programs may disturb some
_LEAST, _MOST = 64 << 20, 512 << 20  # bytes of all pieces
_CPUS = Path("/sys/devices/system/cpu")


class ReadBandwidth:
    def __init__(self, num_bytes: int) -> None:
        """num_bytes: of memory that is read in a round."""
        self.bytes_per_s = 0.0  # 0: not measured yet
        self._num_pieces = max(1, num_bytes // _PIECE)
        self._pieces: list[Tensor] = []  # those that have memory
        self._fastest = [float("inf")] * self._num_pieces  # seconds of a reading
        self._num_read = 0

    def advance(self) -> bool:
        """Does one piece of work, if there is any. Returns whether there is more."""
        if self.bytes_per_s:
            return False
        if len(self._pieces) < self._num_pieces:
            memory = mmap.mmap(-1, _PIECE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            matrix = torch.frombuffer(memory, dtype=torch.float32).view(-1, _COLUMNS)
            self._pieces.append(matrix.fill_(1.0))  # which gives it its pages
            return True
        piece = self._num_read % self._num_pieces
        started = time.perf_counter()
        torch.mv(self._pieces[piece], self._pieces[piece - 1][0])
        self._fastest[piece] = min(self._fastest[piece], time.perf_counter() - started)
        self._num_read += 1
        if self._num_read < _ROUNDS * self._num_pieces:
            return True
        self.bytes_per_s = self._num_pieces * _PIECE / sum(self._fastest)
        self._pieces.clear()
        return False


def enough_to_miss(cpus: Path = _CPUS) -> int:
    """Bytes that do not fit into the last caches of this machine, within bounds."""
    caches = {}
    for cache in cpus.glob("cpu[0-9]*/cache/index3"):
        try:
            shared, size = (cache / "shared_cpu_list").read_text(), (cache / "size").read_text().strip()
            caches[shared] = int(size.removesuffix("K")) << 10
        except (OSError, ValueError):  # a system that hides it, or another unit
            continue
    return min(_MOST, max(_LEAST, 2 * sum(caches.values())))
