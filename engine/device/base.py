"""What the runner asks of a device, and the one place where it is chosen."""

from typing import Protocol

import torch

from ...config.config import EngineConfig
from ...errors import ConfigError
from ..parallel.rank import RankInfo
from .queue import Queue


class Device(Protocol):
    """One device of this process."""

    torch_device: torch.device

    def queue(self) -> Queue | None:
        """Where steps that run ahead of the host are put, if the device is one for them."""

    def cache_memory(self, *, taken: int) -> int:
        """Bytes for the KV cache if nobody says otherwise. taken: bytes that the model and its steps take in all, some
        of which they hold already."""

    def synchronize(self) -> None:
        """Returns when everything launched so far is done."""

    def trim(self) -> None:
        """Lets others have the memory that nothing is kept in."""


def choose_device(config: EngineConfig, *, place: RankInfo) -> Device:
    """auto: CUDA if there is a device. Each rank of this machine has a CUDA device of its own; on a CPU they share the
    memory. Raises ConfigError for a device that torch cannot use, and where ranks outnumber devices."""
    num_here = len(place.ranks_here)
    if config.device != "cpu" and torch.cuda.is_available():
        from .cuda import CudaDevice

        if num_here > torch.cuda.device_count():
            raise ConfigError(
                f"--tensor-parallel-size: {num_here} ranks on this machine need a CUDA device each, and torch sees "
                f"{torch.cuda.device_count()}."
            )
        return CudaDevice(place.local_rank, utilization=config.gpu_memory_utilization)
    if config.device == "cuda":
        raise ConfigError("--device cuda was asked for, but torch sees no CUDA device here.")
    if config.kernels is None:  # everything else was decided for a GPU
        raise ConfigError(
            "There is an NVIDIA device, but torch cannot use it; `pagewire doctor` says why, and --device cpu does "
            "without it."
        )
    from .cpu import CpuDevice

    return CpuDevice(num_threads=config.num_threads, num_sharers=num_here * config.data_parallel_size)


def is_out_of_memory(error: Exception) -> bool:
    """Whether this is what torch, NumPy or Python say when there is no memory. On a CPU torch has no class for it."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or (
        type(error) is RuntimeError and "you tried to allocate" in str(error)
    )
