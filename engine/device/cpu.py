"""The CPU as a device: its threads and its memory. Work is done when the call that launches it returns."""

import torch

from ...config.machine import available_memory
from .bandwidth import ReadBandwidth, enough_to_miss
from .kept_memory import KeptMemory
from .report import DeviceReport

_CACHE_SHARE = 0.4  # of free memory: the machine runs other processes, and the cache never shrinks
_CACHE_MAX = 4 << 30


class CpuDevice:
    """Sets the number of torch's threads for the whole process."""

    def __init__(self, *, num_threads: int, num_sharers: int) -> None:
        """num_sharers: processes of this engine whose caches share the memory, this one included."""
        self._num_sharers = num_sharers
        self.torch_device = torch.device("cpu")
        self.capability: int | None = None
        self.kept_memory: KeptMemory | None = None
        self._bandwidth = ReadBandwidth(enough_to_miss())
        torch.set_num_threads(num_threads)

    def queue(self) -> None:
        return None

    def cache_memory(self, *, taken: int, found: int = 0) -> int:
        return min(int(_CACHE_SHARE * available_memory()), _CACHE_MAX) // self._num_sharers

    def synchronize(self) -> None:
        pass

    def trim(self) -> None:
        pass

    def report(self) -> DeviceReport:
        found = self._bandwidth.bytes_per_s
        return DeviceReport(found, "measured") if found else DeviceReport()

    def measure(self) -> bool:
        return self._bandwidth.advance()

    def close(self) -> None:
        pass
