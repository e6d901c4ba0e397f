"""A CUDA device: its memory, and the queue for its steps."""

import torch

from ...kernels.triton import cubins
from .kept_memory import KeptMemory, cuda_memory
from .nvml import GpuMeter
from .queue import CudaQueue
from .report import DeviceReport

# Modules of kernels, of cuBLAS and of NCCL, which are loaded later. An assumption, not measured.
_RESERVE_BYTES = 512 << 20


class CudaDevice:
    """Makes the device the process's current one."""

    def __init__(self, index: int, *, utilization: float) -> None:
        """utilization: the share of the device's memory that this process may take."""
        torch.cuda.set_device(index)
        self.torch_device = torch.device("cuda", index)
        self._utilization = utilization
        self._free_at_start, self._total = torch.cuda.mem_get_info(index)
        self._queue = CudaQueue(self.torch_device)
        kernels = cubins.share_cache()
        major, minor = torch.cuda.get_device_capability(index)
        self.capability: int | None = 10 * major + minor
        self.kept_memory: KeptMemory | None = cuda_memory(index)
        uuid = getattr(torch.cuda.get_device_properties(index), "uuid", None)  # which some builds lack
        self._meter = None if uuid is None else GpuMeter.start(f"GPU-{uuid}")
        if (archive := cubins.shipped(self.capability)).exists():
            cubins.install_shipped(archive, kernels)

    def queue(self) -> CudaQueue:
        return self._queue

    def cache_memory(self, *, taken: int, found: int = 0) -> int:
        """The share that `utilization` allows, but no more than was free at start without the reserve, less what the
        model takes."""
        free = self._free_at_start + found - _RESERVE_BYTES
        return max(0, min(int(self._utilization * self._total), free) - taken)

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.torch_device)

    def trim(self) -> None:
        torch.cuda.empty_cache()

    def report(self) -> DeviceReport:
        if self._meter is None:
            return DeviceReport()
        bandwidth = self._meter.bandwidth
        return DeviceReport(bandwidth, "nominal" if bandwidth else "", self._meter.values)

    def measure(self) -> bool:
        return False

    def close(self) -> None:
        if self._meter is not None:
            self._meter.close()
            self._meter = None
