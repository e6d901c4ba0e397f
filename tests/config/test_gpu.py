"""What compute capabilities allow, and how they are found."""

import ctypes
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from pagewire.config import gpu
from pagewire.config.config import GpuFacts
from pagewire.errors import ConfigError

# NVIDIA's library as far as it is asked, for devices of the capabilities in `found`. Each has 8 GB, or as many as its
# capability says; half of it is free.
_LIBRARY = """
#include <stdio.h>
#include <string.h>
static const int found[] = {%s};
static const int is_size = %d;
int nvmlInit_v2(void) { return %d; }
int nvmlShutdown(void) { return 0; }
int nvmlDeviceGetCount_v2(unsigned *num) { *num = sizeof found / sizeof *found; return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **device) { *device = (void *)&found[index]; return 0; }
int nvmlDeviceGetCudaComputeCapability(void *device, int *major, int *minor) {
    *major = *(int *)device / 10, *minor = *(int *)device %% 10;
    return 0;
}
int nvmlDeviceGetUUID(void *device, char *name, unsigned size) {
    snprintf(name, size, "GPU-%%d", (int)((int *)device - found));
    return 0;
}
int nvmlDeviceGetHandleByUUID(const char *name, void **device) {
    for (unsigned i = 0; i < sizeof found / sizeof *found; i++) {
        char own[16];
        nvmlDeviceGetUUID((void *)&found[i], own, sizeof own);
        if (!strcmp(own, name)) { *device = (void *)&found[i]; return 0; }
    }
    return 6;
}
int nvmlDeviceGetMemoryInfo(void *device, unsigned long long *memory) {
    memory[0] = (is_size ? *(int *)device : 8) * 1000000000ull, memory[1] = memory[2] = memory[0] / 2;
    return 0;
}
"""


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """(capabilities, code of the initialization, they are sizes as well) → this machine has such devices."""
    cc = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if cc is None:
        pytest.skip("no C compiler")
    load = ctypes.CDLL

    def make(capabilities: str, code: int = 0, *, are_sizes: bool = False) -> None:
        source = tmp_path / "nvml.c"
        source.write_text(_LIBRARY % (capabilities, are_sizes, code))
        path = tmp_path / f"nvml-{capabilities}-{code}-{are_sizes}.so"
        subprocess.run([cc, "-shared", "-fPIC", "-w", str(source), "-o", str(path)], check=True)
        monkeypatch.setattr(ctypes, "CDLL", lambda name: load(str(path)))

    return make


def test_the_lowest_capability(library: Callable[..., None]) -> None:
    library("90")
    assert gpu.lowest_capability({}) == 90
    library("89,80,89")
    assert gpu.lowest_capability({}) == 80
    assert gpu.lowest_capability({"CUDA_VISIBLE_DEVICES": "0"}) is None, "they are numbered in another order"
    library("75,75")
    assert gpu.lowest_capability({"CUDA_VISIBLE_DEVICES": "1"}) == 75
    library("90", 9)
    assert gpu.lowest_capability({}) is None


def test_the_memory_of_the_gpus_that_may_be_used(library: Callable[..., None]) -> None:
    library("90,90,90")
    half = 4_000_000_000
    everything = tuple(GpuFacts(name=f"GPU-{i}", total_bytes=2 * half, free_bytes=half) for i in range(3))
    assert gpu.visible_gpus({}) == everything
    assert gpu.visible_gpus({"CUDA_VISIBLE_DEVICES": "2, 0"}) == (everything[2], everything[0])
    assert gpu.visible_gpus({"CUDA_VISIBLE_DEVICES": "1,7,0"}) == everything[1:2], "CUDA stops at a wrong number"
    assert gpu.visible_gpus({"CUDA_VISIBLE_DEVICES": "GPU-1"}) == everything[1:2]
    assert gpu.visible_gpus({"CUDA_VISIBLE_DEVICES": "GPU-9"}) == ()
    assert gpu.free_gpu_memory(["GPU-2", "GPU-0"]) == (half, half)
    library("80,90", are_sizes=True)
    assert [found.total_bytes for found in gpu.visible_gpus({})] == [80_000_000_000, 90_000_000_000]
    assert gpu.visible_gpus({"CUDA_VISIBLE_DEVICES": "0"}) == (), "CUDA may number them in another order"
    assert len(gpu.visible_gpus({"CUDA_VISIBLE_DEVICES": "GPU-0"})) == 1
    library("90", 9)
    assert gpu.visible_gpus({}) == () and gpu.free_gpu_memory(["GPU-0"]) is None


def test_without_a_driver_it_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise OSError(name)

    monkeypatch.setattr(ctypes, "CDLL", missing)
    assert gpu.lowest_capability({}) is None


def test_an_fp8_cache_needs_its_conversion() -> None:
    for capability in (None, 89, 90, 120):
        gpu.check_fp8("fp8", capability)
    gpu.check_fp8("bfloat16", 80)
    with pytest.raises(ConfigError, match=r"fp8 needs a GPU of compute capability 8\.9 .* this one has 8\.0: leave"):
        gpu.check_fp8("fp8", 80)
    assert gpu.show_capability(120) == "12.0"
