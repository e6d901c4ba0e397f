"""What NVIDIA GPUs can do by their compute capability, and how to find it without torch. 89 stands for 8.9."""

import ctypes
from collections.abc import Mapping

from ..errors import ConfigError

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
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
        if library.nvmlInit_v2():
            return None
        found = _capabilities(library)
        library.nvmlShutdown()
    except (OSError, AttributeError):  # no driver, or an old one
        return None
    if not found or (len(found) > 1 and environment.get("CUDA_VISIBLE_DEVICES")):
        return None
    return min(found)


def _capabilities(library: ctypes.CDLL) -> set[int]:
    num, found = ctypes.c_uint(), set()
    if library.nvmlDeviceGetCount_v2(ctypes.byref(num)):
        return set()
    for index in range(num.value):
        device, major, minor = ctypes.c_void_p(), ctypes.c_int(), ctypes.c_int()
        if library.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(index), ctypes.byref(device)):
            return set()
        if library.nvmlDeviceGetCudaComputeCapability(device, ctypes.byref(major), ctypes.byref(minor)):
            return set()
        found.add(10 * major.value + minor.value)
    return found
