"""Shared memory for packed weights (`engine/weights/segment.py`), or for the index of those on a GPU.

The supervisor, or the launcher of several engines, makes and holds it without mapping it, and their workers inherit it.
It is freed when all of these processes have ended.
"""

import os
from collections.abc import Iterable

from ..config.config import EngineConfig

_NOT_EXECUTABLE = 0x8  # MFD_NOEXEC_SEAL of memfd_create(2), which some systems demand and old ones do not know


def new_segments(config: EngineConfig) -> list[int]:
    """A memfd for the packed weights of each rank. Empty if the workers could not use them."""
    if not config.runs_in_c or not hasattr(os, "memfd_create"):
        return []
    try:
        return [new_segment() for _ in range(config.num_ranks)]
    except OSError:  # a sandbox forbids it: each worker packs into memory of its own
        return []


def keeps_on_device(config: EngineConfig) -> bool:
    """Whether keepers hold the weights (`weight_keeper.py`): on a GPU, where Triton kernels may compute."""
    return config.kernels is None and config.model.is_native and hasattr(os, "memfd_create")


def new_segment() -> int:
    """Raises OSError."""
    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
    try:
        return os.memfd_create("pagewire-weights", flags | _NOT_EXECUTABLE)
    except OSError:
        return os.memfd_create("pagewire-weights", flags)


def close_segments(fds: Iterable[int]) -> None:
    for fd in fds:
        os.close(fd)
