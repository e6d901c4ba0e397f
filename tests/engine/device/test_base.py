"""The device that a rank gets, and how much of its memory."""

import pytest
import torch

from pagewire.config.config import MachineFacts, ModelFacts
from pagewire.config.flags import make_config
from pagewire.config.resolve import resolve
from pagewire.engine.device import cpu
from pagewire.engine.device.base import choose_device, is_out_of_memory
from pagewire.engine.parallel.rank import RankInfo
from pagewire.errors import ConfigError


def _config(device, *, has_gpu=False):
    facts = ModelFacts(path="m", name="m", max_position=64, vocab_size=8, eos_token_ids=(), checkpoint_dtype="float32")
    threads = torch.get_num_threads()
    return resolve(make_config(device=device, threads=threads), facts, MachineFacts(num_cores=1, has_gpu=has_gpu))


def test_ranks_on_cpus_share_the_memory(monkeypatch):
    monkeypatch.setattr(cpu, "available_memory", lambda: 1000)
    alone = choose_device(_config("cpu"), rank_info=RankInfo())
    third = choose_device(_config("cpu"), rank_info=RankInfo(1, (0, 1, 2)))
    sizes = [device.cache_memory(taken=0) for device in (alone, third)]
    assert sizes == [400, 133]


@pytest.mark.parametrize("device", ["auto", "cuda"])
def test_a_gpu_that_torch_cannot_use_is_an_error_unless_the_device_is_cpu(device, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match=r"torch cannot use|torch sees no CUDA device"):
        choose_device(_config(device, has_gpu=True), rank_info=RankInfo())
    choose_device(_config("cpu", has_gpu=True), rank_info=RankInfo())


def test_more_ranks_than_cuda_devices_are_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ConfigError, match="3 ranks on this machine need a CUDA device each, but torch sees 2"):
        choose_device(_config("auto"), rank_info=RankInfo(0, (0, 1, 2)))


def test_the_local_rank_counts_ranks_on_this_machine():
    assert RankInfo(5, (4, 5, 6)).local_rank == 1


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."), True),
        (MemoryError(), True),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 10 bytes."), True),
        (RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be reported later."), True),
        (RuntimeError("Triton Error [CUDA]: out of memory"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), False),
        (ValueError("out of memory"), False),
    ],
)
def test_errors_for_lack_of_memory(error, expected):
    assert is_out_of_memory(error) is expected
