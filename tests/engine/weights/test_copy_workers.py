"""Copies to a slow device: no staging buffer is overwritten before its copy has run, and no data is lost."""

import random
import threading
from contextlib import contextmanager

import checkpoints
import families
import programs
import pytest
import torch
from torch.overrides import TorchFunctionMode

from pagewire.engine.weights.copy_workers import DirectCopy, Jobs, StagedCopy


def late_worker(num_bytes=64):
    """A worker whose copies run only when waited for, so that reusing a buffer too early gives wrong results."""

    def send(target, staged):
        def wait():
            target.copy_(staged)

        return wait

    return StagedCopy([torch.zeros(num_bytes, dtype=torch.uint8) for _ in range(2)], send)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
@pytest.mark.parametrize("size", [0, 1, 16, 17, 400])
def test_tensors_of_any_size_are_copied_through_small_buffers(dtype, size):
    worker = late_worker()
    sources = [torch.randint(0, 250, (size,)).to(dtype) for _ in range(3)]
    targets = [torch.full_like(source, 7) for source in sources]
    for target, source in zip(targets, sources, strict=True):
        worker.fill(target, source)
    worker.wait()
    for target, source in zip(targets, sources, strict=True):
        assert torch.equal(target, source)


def test_a_strided_source_is_copied_and_cast():
    source = torch.randn(12, 20)[:, 3:9]
    target = torch.zeros(12, 6, dtype=torch.bfloat16)
    worker = late_worker()
    worker.fill(target, source)
    worker.wait()
    assert torch.equal(target, source.bfloat16())


@pytest.mark.parametrize("rows", [3, 40])
@pytest.mark.parametrize("is_source_contiguous", [False, True])
def test_a_part_of_each_matrix_of_a_stack_is_filled(is_source_contiguous, rows):
    """As gates and ups that are one tensor are. rows: a part is less, or more, than a buffer has room for."""
    source = torch.randn(5, 6, rows).transpose(1, 2) if not is_source_contiguous else torch.randn(5, rows, 6)
    memory = torch.full((5, rows + 2, 6), torch.nan, dtype=torch.bfloat16)
    worker = late_worker()
    worker.fill(memory[:, 1 : 1 + rows], source)
    worker.wait()
    assert torch.equal(memory[:, 1 : 1 + rows], source.bfloat16())
    assert memory[:, [0, -1]].isnan().all(), "other rows are not written"


class _Copied(TorchFunctionMode):
    """Notes the most numbers that `reshape` and `contiguous` copied at once."""

    most = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func.__name__ in ("reshape", "contiguous") and result.data_ptr() != args[0].data_ptr():
            self.most = max(self.most, result.numel())
        return result


def test_of_a_transposed_stack_one_matrix_is_copied_at_a_time():
    """There may be no memory for a copy of all experts of a layer beside those of other workers."""
    source = torch.randn(5, 6, 40).transpose(1, 2)
    target = torch.empty(source.shape)
    worker = late_worker()
    with _Copied() as copied:
        worker.fill(target, source)
        worker.wait()
    assert torch.equal(target, source) and copied.most <= 6 * 40


@pytest.mark.parametrize("workers", [1, 3])
def test_results_of_jobs_are_taken_in_order(workers):
    """Three workers finish each three jobs in reverse order."""
    jobs = Jobs([late_worker() for _ in range(workers)] if workers > 1 else [DirectCopy()])
    rng = random.Random(0)
    sources = [torch.randn(rng.randrange(1, 90)) for _ in range(60)]
    targets = [torch.zeros_like(source) for source in sources]
    done, ended, taken = [threading.Event() for _ in range(60)], [], []

    def job(i, worker):
        assert workers == 1 or i % 3 == 2 or done[i + 1].wait(60), "the next job has not ended"
        worker.fill(targets[i], sources[i])
        ended.append(i)
        done[i].set()
        return i

    for i in range(60):
        jobs.put(lambda worker, i=i: job(i, worker), taken.append)
    jobs.finish()
    jobs.close()
    assert (ended == sorted(ended)) == (workers == 1) and taken == list(range(60))
    for target, source in zip(targets, sources, strict=True):
        assert torch.equal(target, source)


STACKED = ("gpt_oss", "llama4_text")  # gates and ups of all experts are one tensor: in turn, and one after the other


@pytest.mark.parametrize("kind", ["llama-biased", "qwen3_moe", *STACKED])
def test_workers_load_the_same_weights_as_a_direct_copy(kind, tmp_path, monkeypatch):
    make = families.make_family if kind in STACKED else checkpoints.make_checkpoint
    folder = make(tmp_path, kind)

    @contextmanager
    def late_workers(device):
        jobs = Jobs([late_worker(1024) for _ in range(3)])
        yield jobs
        jobs.finish()
        jobs.close()

    direct = programs.load(folder, torch.bfloat16).tensors
    monkeypatch.setattr("pagewire.engine.weights.loader.copy_jobs", late_workers)
    in_workers = programs.load(folder, torch.bfloat16).tensors
    assert direct.keys() == in_workers.keys()
    assert all(torch.equal(in_workers[key], tensor) for key, tensor in direct.items())


@pytest.mark.parametrize("workers", [1, 3])
def test_an_error_in_a_job_is_raised(workers):
    jobs = Jobs([late_worker() for _ in range(workers)])

    def fail(worker):
        raise OSError("the disk is gone")

    with pytest.raises(OSError, match="gone"):
        jobs.put(fail, lambda result: None)
        jobs.finish()
    jobs.close()
