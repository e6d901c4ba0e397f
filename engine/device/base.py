"""The runner's interface to a device, and the choice of the device."""

from typing import Protocol

import torch

from ...config.config import EngineConfig
from ...errors import ConfigError
from ..parallel.rank import RankInfo
from .kept_memory import KeptMemory
from .queue import Queue
from .report import DeviceReport


class Device(Protocol):
    """One device of this process."""

    torch_device: torch.device
    capability: int | None  # of a GPU: 90 for 9.0
    kept_memory: KeptMemory | None  # that outlives this process; None: the device has none

    def queue(self) -> Queue | None:
        """The queue for steps that run ahead of the host; None if the device has none."""

    def cache_memory(self, *, taken: int, found: int = 0) -> int:
        """Bytes for the KV cache by default. taken: bytes that the model and its steps take in all, some of which are
        already allocated. found: bytes of it, or that are free now, that were taken when this process began."""

    def synchronize(self) -> None:
        """Returns when all launched work is done."""

    def trim(self) -> None:
        """Returns cached free memory to the system."""

    def report(self) -> DeviceReport:
        """What is known of it now."""

    def measure(self) -> bool:
        """Does one piece of what `report` needs, of a few milliseconds. Returns whether there is more. Called while no
        request waits."""

    def close(self) -> None:
        """Ends its threads."""


def choose_device(config: EngineConfig, *, rank_info: RankInfo) -> Device:
    """auto: CUDA if there is a device. Each rank of this machine takes a CUDA device of its own; on a CPU they share
    the memory. Raises ConfigError for a device that torch cannot use, and if there are more ranks than devices."""
    num_here = len(rank_info.ranks_here)
    if config.device != "cpu" and torch.cuda.is_available():
        from .cuda import CudaDevice

        if num_here > torch.cuda.device_count():
            raise ConfigError(
                f"--tensor-parallel-size and --pipeline-parallel-size: {num_here} ranks on this machine need a CUDA "
                f"device each, but torch sees {torch.cuda.device_count()}."
            )
        return CudaDevice(rank_info.local_rank, utilization=config.gpu_memory_utilization)
    if config.device == "cuda":
        raise ConfigError("--device cuda: torch sees no CUDA device. `pagewire doctor` says why.")
    if config.kernels is None and config.device != "cpu":  # `resolve` has decided everything for a GPU
        raise ConfigError(
            "There is an NVIDIA device that torch cannot use. `pagewire doctor` says why; --device cpu serves "
            "without it."
        )
    from .cpu import CpuDevice

    return CpuDevice(num_threads=config.num_threads, num_sharers=num_here * config.data_parallel_size)


# In messages of torch on a CPU, of CUDA (graph instantiation, loading of kernels), and of cuBLAS.
_OUT_OF_MEMORY = ("you tried to allocate", "out of memory", "CUBLAS_STATUS_ALLOC_FAILED")


def is_out_of_memory(error: Exception) -> bool:
    """Whether this is an out-of-memory error of torch, CUDA, cuBLAS, NumPy or Python. Some of them have no class of
    their own."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in _OUT_OF_MEMORY)
