"""How much memory of a GPU the engine takes: with stand-ins for torch's CUDA."""

from types import SimpleNamespace

import pytest
import torch

from pagewire.engine.device.cuda import CudaDevice

GB = 1 << 30
RESERVE = 512 << 20


@pytest.fixture(autouse=True)
def _cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", "unused")
    stand_ins = {
        "set_device": lambda index: None,
        "set_stream": lambda stream: None,
        "Stream": lambda device: None,
        "graph_pool_handle": lambda: (0, 1),
        "get_device_capability": lambda index: (0, 0),  # for which no kernels are shipped
        "get_device_properties": lambda index: SimpleNamespace(),
    }
    for name, stand_in in stand_ins.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    monkeypatch.setattr(torch.backends.cuda, "cublas_workspace_size", lambda: 0, raising=False)


@pytest.mark.parametrize(
    ("free", "share", "found", "expected"),
    [
        (79 * GB, 0.5, 0, 40 * GB),  # the share
        (79 * GB, 1.0, 0, 79 * GB - RESERVE),
        (30 * GB, 0.9, 0, 30 * GB - RESERVE),  # other processes take the rest
        (30 * GB, 0.9, 20 * GB, 50 * GB - RESERVE),  # of which 20 GB are this rank's own weights
        (30 * GB, 0.5, 20 * GB, 40 * GB),
    ],
)
def test_something_of_the_free_memory_is_left_for_what_is_loaded_later(
    free: int, share: float, found: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: (free, 80 * GB))
    device = CudaDevice(0, utilization=share)
    assert device.cache_memory(taken=0, found=found) == expected
    assert device.cache_memory(taken=7 * GB, found=found) == expected - 7 * GB
    assert device.cache_memory(taken=80 * GB, found=found) == 0
