"""Ranks that are real processes and share memory: sums against torch, and ranks that end."""

import ctypes
import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
import torch
from tensor_files import load_tensors, save_tensors
from waiting import until

from pagewire.config.machine import machine_facts
from pagewire.engine.parallel.collectives import GlooGroup, Group, NoMemoryElsewhere, OneShot, SharedMemoryGroup, join
from pagewire.engine.parallel.rank import RankInfo
from pagewire.engine.parallel.shared_memory import SharedMemory, make_memory
from pagewire.kernels.cpu import build, levels

DTYPES = [torch.float32, torch.bfloat16]
# Elements: one, no multiple of a vector, exactly a round of float32, two rounds and a rest.
SIZES = [1, 17, 4096, 65536, 140001]
# Of a process. The first one that needs a level compiles it, which takes a minute on a busy machine.
TIMEOUT_S = 300.0
NUM_GATHERED = 7 * 10001  # float64, so three rounds
# Of all-to-alls: rows of 12 bytes for a rank itself, the next one, and the one after it. The last takes four rounds.
NUM_ROWS = [[3, 1, 2], [0, 0, 5], [0, 0, 0], [70_000, 0, 1], [1, 80_000, 3]]


def part(rank: int, num: int, dtype: torch.dtype) -> torch.Tensor:
    """A rank's part of a sum: numbers of very different sizes, whose sum depends on the order."""
    generator = torch.Generator().manual_seed(1000 * rank + num)
    exponents = torch.randint(-12, 12, (num,), generator=generator)
    return torch.ldexp(torch.randn(num, generator=generator), exponents).to(dtype)


def rows(sender: int, receiver: int, num: int) -> torch.Tensor:
    """What a rank gives another one in an all-to-all, [num, 3]."""
    return part(10 * sender + receiver, 3 * num, torch.float32).view(num, 3)


def exchanged(group: Group, nums: list[int], *, is_known: bool = False) -> torch.Tensor:
    """An all-to-all in which a rank gives all that are `i` ranks behind it nums[i] rows. is_known: each knows what it
    gets."""
    counts = [nums[(receiver - group.rank) % group.size] for receiver in range(group.size)]
    x = torch.cat([rows(group.rank, receiver, num) for receiver, num in enumerate(counts)])
    before = group.sent_bytes
    wanted = [nums[(group.rank - sender) % group.size] for sender in range(group.size)]
    found, got = group.all_to_all(x, counts, sum(nums), wanted if is_known else None)
    assert got == wanted
    of_others = 12 * sum(nums[1 : group.size])
    head = 8 * group.size * (group.size - 1)  # the numbers of bytes, which every other rank reads
    assert group.sent_bytes - before in (of_others, of_others + head)
    return found


def special(rank: int) -> torch.Tensor:
    """What is not finite, signed zeros, and sums that lie between two numbers of bfloat16."""
    rows = [[float("nan"), float("inf"), float("inf"), -0.0, 256.0, 258.0, 3e38], [1.0, 1.0, -float("inf"), -0.0, 1.0]]
    return torch.tensor((rows[rank] if rank < 2 else []) + [0.0] * 7)[:7]


def bits(x: torch.Tensor) -> torch.Tensor:
    """A tensor's bytes; every NaN is the same, but a zero has its sign."""
    return x.masked_fill(x.isnan(), float("nan")).view(torch.uint8)


def scattered(rank: int, size: int) -> torch.Tensor:
    return part(rank, 35 * size, torch.float32).view(5 * size, 7)


def own_of_sum(group: Group, x: torch.Tensor) -> torch.Tensor:
    """Does not change x."""
    before, out = x.clone(), x.new_empty((len(x) // group.size, x.shape[1]))
    group.reduce_scatter(x, out)
    assert torch.equal(x, before)
    return out


def rank_info(rank: int, size: int, fd: int, folder: Path) -> RankInfo:
    return RankInfo(rank, tuple(range(size)), f"file://{folder}/ranks", fd)


def take_part(rank: int, size: int, fd: int, folder: Path) -> None:
    """A rank's process: stores what it got of every operation."""
    group = join(rank_info(rank, size, fd, folder), size, torch.device("cpu"))
    assert isinstance(group, SharedMemoryGroup)
    got = []
    for repetition in range(3):
        for dtype in DTYPES:
            for num in SIZES:
                x = part(rank, num + repetition, dtype)
                group.all_reduce(x)
                got.append(x)
            x = special(rank).to(dtype)
            group.all_reduce(x)
            got.append(x)
        got.append(group.all_gather(part(rank, NUM_GATHERED, torch.float64).view(7, -1)))
        got.append(own_of_sum(group, scattered(rank, size)))
        for nums in NUM_ROWS:
            got.append(exchanged(group, nums))
    many = torch.tensor([float(rank)])
    for _ in range(2000):  # so that ranks are often a round apart
        group.all_reduce(many)
        many.fmod_(97.0)
    save_tensors([*got, many], folder / f"rank-{rank}.safetensors")


def sum_at_a_level(rank: int, size: int, fd: int, folder: Path) -> None:
    """With the kernels that the engine was told to use, and no others."""
    group = join(rank_info(rank, size, fd, folder), size, torch.device("cpu"), level="portable")
    x = torch.ones(1000)
    group.all_reduce(x)
    assert isinstance(group, SharedMemoryGroup) and x.tolist() == [size] * 1000
    maps = Path("/proc/self/maps").read_text()
    assert str(build.find("portable").path) in maps and str(build.find().path) not in maps


def sum_for_ever(rank: int, size: int, fd: int, folder: Path) -> None:
    group = join(rank_info(rank, size, fd, folder), size, torch.device("cpu"))
    (folder / f"met-{rank}").touch()
    while True:
        group.all_reduce(torch.ones(1000))
        exchanged(group, NUM_ROWS[0])


def sum_in_c_for_ever(rank: int, size: int, fd: int, folder: Path) -> None:
    """Sums in the way of the C program. A slot of the shared memory has room for less than the tensor."""
    group = join(rank_info(rank, size, fd, folder), size, torch.device("cpu"))
    assert isinstance(group, SharedMemoryGroup)
    add = build.find().load().pagewire_sum
    add.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_long)
    (folder / f"met-{rank}").touch()
    while True:
        x = torch.ones(200_000)
        if not add(ctypes.addressof(group.sum_in_c), x.data_ptr(), len(x)):
            group.check()
        assert x.eq(size).all()


def give_up_steps(rank: int, size: int, fd: int, folder: Path) -> None:
    """Steps of a few sums each. In some of them one rank or several have no memory, before a sum, or before the end:
    then none has done the step. Every rank knows what each of them is to do."""
    group = join(rank_info(rank, size, fd, folder), size, torch.device("cpu"))
    assert isinstance(group, SharedMemoryGroup)
    add = build.find().load().pagewire_sum
    add.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_long)
    rng = random.Random(5)
    for step in range(400):
        num_sums = rng.randrange(4)
        failing = {} if rng.random() < 0.5 else {rng.randrange(size): rng.randrange(num_sums + 1) for _ in range(2)}
        lengths = [rng.choice([1, 40, 70_000]) for _ in range(num_sums)]
        late = rng.randrange(2 * size)  # this rank is slow
        try:
            for number, length in enumerate([*lengths, 0]):
                if rank == late:
                    sleep_a_moment()
                if failing.get(rank) == number:
                    raise MemoryError
                if number == num_sums:
                    group.agree()
                    continue
                x = torch.full((length,), float(rank + step))
                if number == 2:
                    assert exchanged(group, NUM_ROWS[step % len(NUM_ROWS)]).isfinite().all()
                    continue
                if number % 2:
                    group.all_reduce(x)
                elif not add(ctypes.addressof(group.sum_in_c), x.data_ptr(), length):
                    group.check()
                assert x.eq(sum(range(size)) + size * step).all(), step
        except MemoryError as error:
            assert failing and (rank in failing or isinstance(error, NoMemoryElsewhere)), step
            group.give_up()
        else:
            assert not failing, step


def sleep_a_moment() -> None:
    """Lets the other ranks go on and wait."""
    signal.sigtimedwait([signal.SIGUSR1], 0.0005)


def give_up_alone(rank: int, size: int, fd: int, folder: Path) -> None:
    group = join(rank_info(rank, size, fd, folder), size, torch.device("cpu"))
    if rank == 0:
        group.give_up()


def sum_once(rank: int, size: int, fd: int, folder: Path) -> None:
    group = join(rank_info(rank, size, fd, folder), size, torch.device("cpu"))
    (folder / f"met-{rank}").touch()
    x = torch.ones(1000)
    group.all_reduce(x)
    assert x.tolist() == [size] * 1000


def sum_late(rank: int, size: int, fd: int, folder: Path) -> None:
    """Sums once, when SIGUSR1 has come."""
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
    group = join(rank_info(rank, size, fd, folder), size, torch.device("cpu"))
    (folder / f"met-{rank}").touch()
    signal.sigwait([signal.SIGUSR1])
    x = torch.ones(1000)
    group.all_reduce(x)
    assert x.tolist() == [size] * 1000


def exchange_over_gloo(group: GlooGroup) -> None:
    for nums in NUM_ROWS:
        parts = [rows(sender, group.rank, nums[(group.rank - sender) % 2]) for sender in range(2)]
        for is_known in (False, True):
            assert torch.equal(exchanged(group, nums, is_known=is_known), torch.cat(parts))
    total = scattered(0, 2) + scattered(1, 2)
    assert torch.equal(own_of_sum(group, scattered(group.rank, 2)), total[5 * group.rank :][:5])
    out = torch.empty((6, 2))
    assert group.all_gather(torch.full((3, 2), float(group.rank)), out) is out
    assert out[:, 0].tolist() == [0.0] * 3 + [1.0] * 3


def arrive_unable(rank: int, size: int, fd: int, folder: Path) -> None:
    """Meets the others as a rank that cannot load the C kernels, and sums with gloo."""
    SharedMemory(fd, rank=rank, size=size, num_bytes=1 << 20).meet(is_able=False, timeout_s=TIMEOUT_S)
    group = GlooGroup(rank_info(rank, size, fd, folder), size)
    x = torch.full((5,), float(rank))
    group.all_reduce(x)
    assert x.tolist() == [1.0] * 5
    exchange_over_gloo(group)
    torch.distributed.destroy_process_group()  # its threads would abort a process that ends before them


def wait_for_others(rank: int, size: int, fd: int, folder: Path) -> None:
    SharedMemory(fd, rank=rank, size=size, num_bytes=64).meet(is_able=True, timeout_s=TIMEOUT_S)


def leave_early(rank: int, size: int, fd: int, folder: Path) -> None:
    SharedMemory(fd, rank=rank, size=size, num_bytes=64).meet(is_able=True, timeout_s=0.0)


def sleep(rank: int, size: int, fd: int, folder: Path) -> None:
    signal.pause()


def arrive_able(rank: int, size: int, fd: int, folder: Path) -> None:
    group = join(rank_info(rank, size, fd, folder), size, torch.device("cpu"))
    assert isinstance(group, GlooGroup)
    x = torch.full((5,), float(rank))
    group.all_reduce(x)
    assert x.tolist() == [1.0] * 5
    exchange_over_gloo(group)
    torch.distributed.destroy_process_group()  # its threads would abort a process that ends before them


@contextmanager
def ranks(folder: Path, *roles: str) -> Iterator[list[subprocess.Popen[str]]]:
    """A process for each role, a function of this file."""
    fd = make_memory()
    started = []
    with ExitStack() as stack:
        stack.callback(os.close, fd)
        for rank, role in enumerate(roles):
            command = [sys.executable, __file__, role, str(rank), str(len(roles)), str(fd), str(folder)]
            environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": os.pathsep.join(sys.path)}
            process = subprocess.Popen(command, pass_fds=(fd,), stderr=subprocess.PIPE, text=True, env=environment)
            stack.callback(process.communicate)
            stack.callback(process.kill)
            started.append(process)
        yield started


def ends_with(process: subprocess.Popen[str], sentence: str) -> None:
    """The process fails with the sentence as the end of its traceback."""
    _, text = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 1 and text.strip().endswith(sentence), text


pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not machine_facts().has_compiler, reason="without the C kernels ranks use gloo"),
]


@pytest.mark.parametrize("size", [2, 3])
def test_sums_are_added_in_the_order_of_the_ranks_on_every_rank(size: int, tmp_path: Path) -> None:
    with ranks(tmp_path, *["take_part"] * size) as processes:
        for process in processes:
            _, text = process.communicate(timeout=TIMEOUT_S)
            assert process.returncode == 0, text
    expected = []
    for repetition in range(3):
        for dtype in DTYPES:
            for num in [*(num + repetition for num in SIZES), None]:
                parts = [special(r).to(dtype) if num is None else part(r, num, dtype) for r in range(size)]
                total = parts[0].float()
                for other in parts[1:]:
                    total = total + other.float()
                expected.append(total.to(dtype))
        expected.append(torch.stack([part(r, NUM_GATHERED, torch.float64).view(7, -1) for r in range(size)]))
        first, *others = (scattered(r, size) for r in range(size))
        expected.append(sum(others, start=first))
        expected += [torch.zeros(0)] * len(NUM_ROWS)
    for rank in range(size):
        *got, many = load_tensors(tmp_path / f"rank-{rank}.safetensors")
        parts_of = [[rows(sender, rank, nums[(rank - sender) % size]) for sender in range(size)] for nums in NUM_ROWS]
        wanted_rows = [torch.cat(parts) for parts in parts_of] * 3
        assert len(got) == len(expected)
        for found, wanted in zip(got, expected, strict=True):
            if not len(wanted):
                wanted = wanted_rows.pop(0)
            elif wanted.shape == (5 * size, 7):
                wanted = wanted[5 * rank : 5 * (rank + 1)]
            assert found.dtype == wanted.dtype and found.shape == wanted.shape
            assert torch.equal(bits(found), bits(wanted)), (found, wanted)
        total = float(sum(range(size)))
        for _ in range(1999):
            total = total % 97.0 * size
        assert many.item() == total % 97.0


@pytest.mark.skipif(len(levels.levels_here()) == 1, reason="the CPU has one level")
def test_ranks_add_with_the_kernels_of_the_engine(tmp_path: Path) -> None:
    with ranks(tmp_path, *["sum_at_a_level"] * 2) as processes:
        for process in processes:
            _, text = process.communicate(timeout=TIMEOUT_S)
            assert process.returncode == 0, text


@pytest.mark.parametrize("size", [2, 3])
def test_all_ranks_give_up_a_step_that_one_of_them_cannot_do(size: int, tmp_path: Path) -> None:
    with ranks(tmp_path, *["give_up_steps"] * size) as processes:
        for process in processes:
            _, text = process.communicate(timeout=TIMEOUT_S)
            assert process.returncode == 0, text


def test_a_rank_that_ends_is_not_waited_for_after_a_step(tmp_path: Path) -> None:
    with ranks(tmp_path, "give_up_alone", "give_up_alone") as processes:
        ends_with(processes[0], "RuntimeError: rank 1 has ended")


@pytest.mark.parametrize("role", ["sum_for_ever", "sum_in_c_for_ever"])
def test_a_rank_that_is_killed_ends_the_sums_of_the_others(role: str, tmp_path: Path) -> None:
    with ranks(tmp_path, *[role] * 3) as processes:
        until(lambda: all((tmp_path / f"met-{rank}").exists() for rank in range(3)), "the ranks have met", TIMEOUT_S)
        processes[1].kill()
        # One of the others notices it first and ends, and the last one may notice either of them.
        _, first = processes[0].communicate(timeout=TIMEOUT_S)
        _, last = processes[2].communicate(timeout=TIMEOUT_S)
        assert processes[0].returncode == processes[2].returncode == 1, (first, last)
        assert "RuntimeError: rank 1 has ended" in first + last


def num_sleeps(process: subprocess.Popen[str]) -> int:
    """How often the main thread has begun to wait in the kernel."""
    lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("voluntary_ctxt_switches"))


@pytest.mark.parametrize("is_killed", [False, True], ids=["late", "killed"])
def test_a_rank_sleeps_while_it_waits_for_another_one(is_killed: bool, tmp_path: Path) -> None:
    with ranks(tmp_path, "sum_once", "sum_late") as processes:
        waiting, late = processes
        until(lambda: all((tmp_path / f"met-{rank}").exists() for rank in range(2)), "the ranks have met", TIMEOUT_S)
        before = num_sleeps(waiting)
        until(lambda: num_sleeps(waiting) >= before + 3, "it has slept, looked for the other one, and slept", TIMEOUT_S)
        assert waiting.poll() is None
        late.send_signal(signal.SIGKILL if is_killed else signal.SIGUSR1)
        if is_killed:
            ends_with(waiting, "RuntimeError: rank 1 has ended")
        else:
            for process in processes:
                _, text = process.communicate(timeout=TIMEOUT_S)
                assert process.returncode == 0, text


def test_a_rank_that_ends_before_all_have_met(tmp_path: Path) -> None:
    with ranks(tmp_path, "wait_for_others", "leave_early", "sleep") as processes:
        ends_with(processes[1], "did not come.")  # rank 2, or rank 0 if that one starts more slowly
        ends_with(processes[0], "The 3 ranks did not meet: rank 1 has ended.")


def test_ranks_use_gloo_if_one_of_them_has_no_kernels(tmp_path: Path) -> None:
    with ranks(tmp_path, "arrive_able", "arrive_unable") as processes:
        for process in processes:
            _, text = process.communicate(timeout=TIMEOUT_S)
            assert process.returncode == 0, text


if __name__ == "__main__":
    globals()[sys.argv[1]](int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]), Path(sys.argv[5]))


@pytest.mark.parametrize(
    ("dtype", "num", "expected"),
    [
        (torch.float32, 1 << 18, True),
        (torch.float32, (1 << 18) + 4, False),  # more than 1 MiB
        (torch.bfloat16, 8, True),
        (torch.bfloat16, 7, False),  # no multiple of 16 bytes
        (torch.float16, 8, False),  # torch's kernel has no float16
    ],
)
def test_sums_on_gpus_in_one_kernel(dtype: torch.dtype, num: int, expected: bool) -> None:
    assert OneShot.can_sum(torch.empty(num, dtype=dtype)) is expected
