"""What compute capabilities allow, and how they are found."""

import ctypes
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from pagewire.config import gpu
from pagewire.errors import ConfigError

# NVIDIA's library as far as it is asked, for devices of the capabilities in `found`.
_LIBRARY = """
static const int found[] = {%s};
int nvmlInit_v2(void) { return %d; }
int nvmlShutdown(void) { return 0; }
int nvmlDeviceGetCount_v2(unsigned *num) { *num = sizeof found / sizeof *found; return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **device) { *device = (void *)&found[index]; return 0; }
int nvmlDeviceGetCudaComputeCapability(void *device, int *major, int *minor) {
    *major = *(int *)device / 10, *minor = *(int *)device %% 10;
    return 0;
}
"""


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """(capabilities, code of the initialization) → this machine has such devices."""
    cc = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if cc is None:
        pytest.skip("no C compiler")
    load = ctypes.CDLL

    def make(capabilities: str, code: int = 0) -> None:
        source = tmp_path / "nvml.c"
        source.write_text(_LIBRARY % (capabilities, code))
        path = tmp_path / f"nvml-{capabilities}-{code}.so"
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
