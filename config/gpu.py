"""NVIDIA GPUs without torch: what they can do by their compute capability (89 stands for 8.9), and their memory."""

import ctypes
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from ..errors import ConfigError
from .config import GpuFacts

LEAST_CAPABILITY = 80
"""Of the Triton kernels, and of arithmetic in bfloat16."""
_FP8 = 89  # of the conversion to float8 e4m3


def show_capability(capability: int) -> str:
    return f"{capability // 10}.{capability % 10}"


def check_fp8(kv_cache_dtype: str, capability: int | None) -> None:
    """Raises ConfigError if the KV cache cannot be fp8. capability: None if it is unknown."""
    if kv_cache_dtype == "fp8" and capability is not None and capability < _FP8:
        raise ConfigError(
            f"--kv-cache-dtype fp8 needs a GPU of compute capability {show_capability(_FP8)} or newer, and this one "
            f"has {show_capability(capability)}: leave it out, or choose bfloat16 or float16."
        )


def lowest_capability(environment: Mapping[str, str]) -> int | None:
    """Of this machine's GPUs; None: unknown, as where they differ and CUDA_VISIBLE_DEVICES chooses some of them."""
    found = _ask(_capabilities) or set()
    if not found or (len(found) > 1 and environment.get("CUDA_VISIBLE_DEVICES")):
        return None
    return min(found)


def visible_gpus(environment: Mapping[str, str]) -> tuple[GpuFacts, ...]:
    """The GPUs that this process may use, with their memory; empty: unknown, as where they differ and
    CUDA_VISIBLE_DEVICES has numbers, whose order depends on more than this library knows."""
    chosen = environment.get("CUDA_VISIBLE_DEVICES")
    found = _ask(lambda library: _gpus(library, [name.strip() for name in chosen.split(",")] if chosen else None))
    return tuple(found or ())


def free_gpu_memory(names: Sequence[str]) -> tuple[int, ...] | None:
    """The bytes of these GPUs that are free now; None: unknown."""
    found = _ask(lambda library: _gpus(library, names))
    return None if found is None else tuple(gpu.free_bytes for gpu in found)


T = TypeVar("T")


def _ask(question: Callable[[ctypes.CDLL], T]) -> T | None:
    """What NVIDIA's management library answers; None: there is no driver, or an old one."""
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
        if library.nvmlInit_v2():
            return None
        try:
            return question(library)
        finally:
            library.nvmlShutdown()
    except (OSError, AttributeError):
        return None


def _capabilities(library: ctypes.CDLL) -> set[int]:
    found = set()
    for device in _devices(library):
        major, minor = ctypes.c_int(), ctypes.c_int()
        if library.nvmlDeviceGetCudaComputeCapability(device, ctypes.byref(major), ctypes.byref(minor)):
            return set()
        found.add(10 * major.value + minor.value)
    return found


def _devices(library: ctypes.CDLL) -> list[ctypes.c_void_p]:
    """All of the machine, in the order of their places on the bus. Raises OSError."""
    num = ctypes.c_uint()
    _check(library.nvmlDeviceGetCount_v2(ctypes.byref(num)))
    devices = [ctypes.c_void_p() for _ in range(num.value)]
    for index, device in enumerate(devices):
        _check(library.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(index), ctypes.byref(device)))
    return devices


def _check(code: int) -> None:
    if code:
        raise OSError(f"NVML answers {code}")


class _Memory(ctypes.Structure):
    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


def _gpus(library: ctypes.CDLL, names: Sequence[str] | None) -> list[GpuFacts]:
    """Those of these names or numbers; None: all of the machine. Raises OSError."""
    everything = _devices(library) if names is None or any(name.isdigit() for name in names) else []
    devices = []
    for name in names or ():
        device = ctypes.c_void_p()
        if not name.isdigit():
            _check(library.nvmlDeviceGetHandleByUUID(name.encode(), ctypes.byref(device)))
        elif int(name) < len(everything):
            device = everything[int(name)]
        else:
            break  # as CUDA does
        devices.append(device)
    facts = [_facts(library, device) for device in (everything if names is None else devices)]
    if names is not None and everything:
        kinds = {_facts(library, device).total_bytes for device in everything}
        if len(kinds) > 1 or len(_capabilities(library)) > 1:
            return []
    return facts


def _facts(library: ctypes.CDLL, device: ctypes.c_void_p) -> GpuFacts:
    name, memory = ctypes.create_string_buffer(96), _Memory()
    _check(library.nvmlDeviceGetUUID(device, name, ctypes.c_uint(len(name))))
    _check(library.nvmlDeviceGetMemoryInfo(device, ctypes.byref(memory)))
    return GpuFacts(name=name.value.decode(), total_bytes=memory.total, free_bytes=memory.free)
