"""The CPU as a device: its threads and its memory. Everything launched on it is done when the call returns."""

from pathlib import Path

import torch

_CACHE_SHARE = 0.4  # of the memory that is free: the machine has other work, and the cache is never given back
_CACHE_MAX = 4 << 30


class CpuDevice:
    """See `Device`. Sets the number of torch's threads for the whole process."""

    def __init__(self, *, num_threads: int, num_sharers: int) -> None:
        """`num_sharers`: processes of this engine whose caches share the memory, this one included."""
        self._num_sharers = num_sharers
        self.torch_device = torch.device("cpu")
        torch.set_num_threads(num_threads)

    def queue(self) -> None:
        return None

    def cache_memory(self, *, taken: int) -> int:
        return min(int(_CACHE_SHARE * available_memory()), _CACHE_MAX) // self._num_sharers

    def synchronize(self) -> None:
        pass

    def trim(self) -> None:
        pass


def available_memory() -> int:
    """Bytes: the least of what the machine has free and what the process's control group still allows."""
    limits = [_machine_free(Path("/proc/meminfo"))]
    group = Path("/sys/fs/cgroup")
    limit, used = _number(group / "memory.max"), _number(group / "memory.current")
    if limit is not None and used is not None:
        limits.append(limit - used)
    return max(0, min(limits))


def _machine_free(meminfo: Path) -> int:
    try:
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return 4 << 30  # no Linux: nothing says what is free, so assume little


def _number(file: Path) -> int | None:
    try:
        return int(file.read_text())
    except (OSError, ValueError):  # no such limit; "max" is none either
        return None
