"""Copies to a slow device: no staging buffer is overwritten before its copy has run, and no data is lost."""

import random
import threading
from contextlib import contextmanager, nullcontext
from typing import cast

import checkpoints
import families
import programs
import pytest
import torch
from torch.overrides import TorchFunctionMode

from pagewire.engine.checkpoint.spec import read_spec
from pagewire.engine.executors.weights import Options, Packing
from pagewire.engine.runner.served import program_of
from pagewire.engine.weights import copy_workers
from pagewire.engine.weights.copy_workers import DirectCopy, Jobs, StagedCopy, copy_jobs
from pagewire.engine.weights.loader import check_weights, load_weights
from pagewire.engine.weights.open import open_checkpoint
from pagewire.kernels.ops import reference_ops
from pagewire.kernels.reference import TorchMatrix


def late_worker(num_bytes=64, *, buffers=2):
    """A worker whose copies run only when waited for, so that reusing a buffer too early gives wrong results."""

    def send(target, staged):
        def wait():
            target.copy_(staged)

        return wait

    return StagedCopy([torch.zeros(num_bytes, dtype=torch.uint8) for _ in range(buffers)], send)


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
    """A target whose rows are a part of each expert's, such as the gates in a tensor of gates and ups. rows: of a part,
    which fits into a buffer or does not."""
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


def test_a_matrix_is_packed_after_its_copies_have_run(tmp_path, monkeypatch):
    """The keys of latent attention are copied when they are packed: transposed, and each head for itself. No buffer is
    used twice, so no copy has run because its buffer was needed."""
    folder = families.make_family(tmp_path, "deepseek_v3")

    @contextmanager
    def late_workers(device):
        jobs = Jobs([late_worker(1 << 15, buffers=200) for _ in range(3)])
        yield jobs
        jobs.finish()
        jobs.close()

    def pack():
        spec, dtype = read_spec(folder), torch.float32
        cpu = torch.device("cpu")
        options = Options(ops=reference_ops(), dtype=dtype, weight_dtype=dtype, device=cpu, keeps=False)
        packing, program = Packing(options), program_of(spec, 0, 1)
        with open_checkpoint(folder) as reader:
            load_weights(reader, program, check_weights(reader, spec.decoder, spec.scheme), packing)
        packed = packing.weights.matrices.items()
        return {key: torch.stack([cast(TorchMatrix, each).weight for each in stack]) for key, stack in packed}

    direct = pack()
    monkeypatch.setattr("pagewire.engine.weights.loader.copy_jobs", late_workers)
    in_workers = pack()
    assert any("kv_b" in key for key in direct)
    assert [key for key, matrices in direct.items() if not torch.equal(in_workers[key], matrices)] == []


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("fails", [False, True])
def test_no_copy_is_under_way_when_a_job_is_over(workers, fails):
    """After an error too: its target may be freed at once."""
    jobs = Jobs([late_worker() for _ in range(workers)])
    source, target, taken = torch.randn(40), torch.zeros(40), []

    def job(worker):
        worker.fill(target, source)
        if fails:
            raise OSError("the disk is gone")

    with pytest.raises(OSError, match="gone") if fails else nullcontext():
        jobs.put(job, lambda result: taken.append(target.clone()))
        jobs.finish()
    assert torch.equal(target, source)
    assert fails or torch.equal(taken[0], source)
    jobs.close()


def test_each_thread_begins_on_the_device_before_its_first_job(monkeypatch):
    """It would begin on GPU 0, whichever is the rank's."""
    chosen, copied = {}, set()

    def worker_of(device):
        worker = late_worker()
        fill = worker.fill

        def checked(target, source):
            assert chosen[threading.get_ident()] == device
            copied.add(threading.get_ident())
            fill(target, source)

        worker.fill = checked
        return worker

    monkeypatch.setattr("pagewire.engine.weights.copy_workers._cuda_worker", worker_of)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: chosen.update({threading.get_ident(): device}))
    sources = [torch.randn(9) for _ in range(20)]
    targets = [torch.zeros(9) for _ in sources]
    with copy_jobs(torch.device("cuda", 3)) as jobs:
        for target, source in zip(targets, sources, strict=True):
            jobs.put(lambda worker, pair=(target, source): worker.fill(*pair), lambda result: None)
    assert all(torch.equal(target, source) for target, source in zip(targets, sources, strict=True))
    assert copied and threading.get_ident() not in chosen, "the caller's device is its own matter"


def test_a_copy_waits_for_work_on_what_lay_in_its_memory_before(monkeypatch):
    """A matrix that was packed is freed while the device packs it, and the next one gets its memory."""

    class Stream:
        """Its work is done when another stream waits for it."""

        def __init__(self, device):
            self.work = []

        def wait_stream(self, other):
            while other.work:
                other.work.pop(0)()

    class Event:
        def record(self, stream):
            pass

        def synchronize(self):
            pass

    empty, callers = torch.empty, Stream(None)
    monkeypatch.setattr(torch, "empty", lambda *args, pin_memory=False, **kwargs: empty(*args, **kwargs))
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: callers)
    worker = copy_workers._cuda_worker(torch.device("cuda", 1))
    memory, packed = torch.ones(3), torch.zeros(3)
    callers.work.append(lambda: packed.copy_(memory))
    worker.fill(memory, torch.full((3,), 7.0))
    worker.wait()
    assert packed.tolist() == [1, 1, 1] and memory.tolist() == [7, 7, 7]
