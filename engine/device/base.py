"""What the runner asks of a device, and the one place where it is chosen."""

from typing import Literal, Protocol

import torch

from ...errors import ConfigError
from ..parallel.place import Place


class Device(Protocol):
    """One device of this process."""

    torch_device: torch.device

    def available_memory(self) -> int:
        """Bytes that this process may still take."""

    def cache_memory(self) -> int:
        """Bytes for the KV cache if nobody says otherwise, given what is available now."""

    def synchronize(self) -> None:
        """Returns when everything launched so far is done."""


def choose_device(wanted: Literal["auto", "cpu", "cuda"], *, num_threads: int, place: Place) -> Device:
    """auto: CUDA if there is a device. Each rank of this machine has a CUDA device of its own; on a CPU they share the
    memory. Raises ConfigError for "cuda" without a device, and where ranks outnumber devices."""
    num_here = len(place.ranks_here)
    if wanted != "cpu" and torch.cuda.is_available():
        from .cuda import CudaDevice

        if num_here > torch.cuda.device_count():
            raise ConfigError(
                f"--tensor-parallel-size: {num_here} ranks on this machine need a CUDA device each, and torch sees "
                f"{torch.cuda.device_count()}."
            )
        return CudaDevice(place.local_rank)
    if wanted == "cuda":
        raise ConfigError("--device cuda was asked for, but torch sees no CUDA device here.")
    from .cpu import CpuDevice

    return CpuDevice(num_threads=num_threads, num_sharers=num_here)
