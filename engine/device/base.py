"""What the runner asks of a device, and the one place where it is chosen."""

from typing import Literal, Protocol

import torch

from ...errors import ConfigError


class Device(Protocol):
    """One device of this process."""

    torch_device: torch.device

    def available_memory(self) -> int:
        """Bytes that this process may still take."""

    def cache_memory(self) -> int:
        """Bytes for the KV cache if nobody says otherwise, given what is available now."""

    def synchronize(self) -> None:
        """Returns when everything launched so far is done."""


def choose_device(wanted: Literal["auto", "cpu", "cuda"], *, num_threads: int) -> Device:
    """auto: CUDA if there is a device. Raises ConfigError for "cuda" without one."""
    if wanted != "cpu" and torch.cuda.is_available():
        from .cuda import CudaDevice

        return CudaDevice()
    if wanted == "cuda":
        raise ConfigError("--device cuda was asked for, but torch sees no CUDA device here.")
    from .cpu import CpuDevice

    return CpuDevice(num_threads=num_threads)
