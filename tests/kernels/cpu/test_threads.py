"""The pool of threads. `threads_driver.c` runs loops on it; here stand the cases, and what can be seen from outside."""

import platform
import signal
import statistics
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from waiting import until

from pagewire.kernels.cpu import build
from pagewire.kernels.cpu.dense import NativeMatrix
from pagewire.kernels.cpu.library import Kernels

pytestmark = pytest.mark.skipif(build.compiler() is None, reason="no C compiler")

_SOURCES = Path(build.__file__).parent
_DRIVER = Path(__file__).with_name("threads_driver.c")
_FLAGS = {"plain": ("-O2",), "sanitizer": ("-O1", "-g", "-fsanitize=thread")}


def compile_driver(folder: Path, flags: tuple[str, ...]) -> str:
    cc = build.compiler()
    assert cc is not None
    target = folder / "driver"
    command = [cc, *flags, "-pthread", f"-I{_SOURCES}", str(_DRIVER), str(_SOURCES / "threads.c"), "-o", str(target)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode and "tsan" in done.stderr:
        pytest.skip("the compiler has no thread sanitizer")
    assert not done.returncode, done.stderr
    return str(target)


@pytest.fixture(scope="module", params=_FLAGS)
def any_driver(request, tmp_path_factory) -> str:
    """The driver's path, compiled with and without the sanitizer."""
    return compile_driver(tmp_path_factory.mktemp("driver"), _FLAGS[request.param])


@pytest.fixture(scope="module")
def driver(tmp_path_factory) -> str:
    return compile_driver(tmp_path_factory.mktemp("driver"), _FLAGS["plain"])


def run(driver: str, case: str, seed: int = 0) -> None:
    done = subprocess.run([driver, case, str(seed)], capture_output=True, text=True, timeout=600)
    if "unexpected memory mapping" in done.stderr:
        pytest.skip("the thread sanitizer does not work with this system's memory layout")
    assert done.returncode == 0, f"{case}, seed {seed}: {done.stdout}{done.stderr}"


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("case", ["once", "callers"])
def test_every_task_runs_once(any_driver, case, seed):
    """Random loops, some within tasks, with numbers of threads that change, for one caller and for four."""
    run(any_driver, case, seed)


@pytest.mark.parametrize("seed", range(3))
def test_every_thread_that_has_a_task_is_woken(any_driver, seed):
    run(any_driver, "meetings", seed)


@pytest.mark.parametrize("case", ["tiny", "scratches"])
def test_loops_and_memory(any_driver, case):
    run(any_driver, case)


@pytest.mark.parametrize(
    "case",
    [
        pytest.param("forks", id="a child of a process with a pool has its own"),
        pytest.param("ended", id="a thread that ends frees its scratch memory"),
        pytest.param("few", id="a system that starts few threads"),
    ],
)
def test_unusual_processes(driver, case):
    run(driver, case)


def test_too_many_tasks_end_the_process(driver):
    done = subprocess.run([driver, "too-many"], timeout=600, check=False)
    assert done.returncode == -signal.SIGABRT


class Threads:
    """A driver that runs loops on demand, and its other threads."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self._process = process

    def run(self, threads: int, loops: int, tasks: int) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(f"{threads} {loops} {tasks}\n")
        self._process.stdin.flush()
        assert self._process.stdout.readline() == "done\n"

    def others(self) -> dict[int, dict[str, str]]:
        """Thread id → its fields of /proc. Without the main thread."""
        tasks = Path(f"/proc/{self._process.pid}/task")
        found = {}
        for path in sorted(tasks.iterdir()):
            if int(path.name) != self._process.pid:
                lines = (path / "status").read_text().splitlines()
                found[int(path.name)] = dict(line.split(":\t", 1) for line in lines if ":\t" in line)
        return found

    def wait_for_sleep(self) -> None:
        until(lambda: all(other["State"].startswith("S") for other in self.others().values()), "sleeping threads")

    def cpu_ns(self) -> int:
        """The CPU time of the other threads."""
        tasks = Path(f"/proc/{self._process.pid}/task")
        return sum(int((tasks / str(thread) / "schedstat").read_text().split()[0]) for thread in self.others())

    def switches(self) -> list[int]:
        """How often each of the other threads has left a core. One that runs in between leaves it afterwards."""
        names = ("voluntary_ctxt_switches", "nonvoluntary_ctxt_switches")
        return [sum(int(other[name]) for name in names) for other in self.others().values()]


@pytest.fixture
def threads(driver) -> Iterator[Threads]:
    with subprocess.Popen([driver, "lines"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        yield Threads(process)
        assert process.stdin is not None
        process.stdin.close()
    assert process.returncode == 0


def test_threads_without_work_sleep(threads):
    threads.run(6, 20, 50)
    assert len(threads.others()) == 5
    threads.wait_for_sleep()
    before = threads.switches()
    threads.run(1, 5000, 50)
    assert threads.switches() == before
    threads.run(6, 20, 50)
    threads.wait_for_sleep()
    assert threads.switches() != before


def test_threads_without_work_spin_only_briefly(threads):
    """They spin for 20 µs after a loop; a longer time takes the CPU from other programs."""
    threads.run(3, 20, 50)
    threads.wait_for_sleep()
    spent = [threads.cpu_ns()]
    for _ in range(50):
        threads.run(3, 1, 2)
        threads.wait_for_sleep()
        spent.append(threads.cpu_ns())
    assert statistics.median(after - before for before, after in pairwise(spent)) < 2 * 300_000


def test_threads_that_later_loops_do_not_have_are_not_woken(threads):
    threads.run(6, 20, 50)
    threads.run(2, 100, 50)
    threads.wait_for_sleep()
    before = threads.switches()
    threads.run(2, 1000, 50)
    threads.wait_for_sleep()
    work = [after - first for first, after in zip(before, threads.switches(), strict=True)]
    assert sum(count > 0 for count in work) <= 1, work


def test_a_loop_wakes_no_more_threads_than_it_has_tasks(threads):
    threads.run(8, 20, 50)
    threads.wait_for_sleep()
    before = threads.switches()
    threads.run(8, 1, 2)
    threads.wait_for_sleep()
    assert sum(after > first for first, after in zip(before, threads.switches(), strict=True)) <= 1


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("rows", [1, 7, 40])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_results_are_equal_for_any_number_of_threads(level: Kernels, dtype, rows):
    weight, x = torch.randn(1000, 96, dtype=dtype), torch.randn(rows, 96)
    found = []
    for count in (1, 2, 5, 8):
        with torch_threads(count):
            assert level.threads() == count
            matrix = NativeMatrix(level, weight)
            found.append((matrix.product(x, None), *matrix.greedy(x)))
    level.threads()
    for others in found[1:]:
        assert all(torch.equal(ours, first) for ours, first in zip(others, found[0], strict=True))


def test_weights_are_packed_by_all_threads():
    """Before the first step, which sets the number of threads again."""
    with torch_threads(3):
        library = build.find().load()
        Kernels(library)
        assert library.pagewire_num_threads() == 3


def test_threads_ask_for_short_slices():
    """All threads of a process whose loops have three, and none of one whose loops have one."""
    call = {"x86_64": 315, "aarch64": 275}.get(platform.machine())
    if call is None or not sys.platform.startswith("linux"):
        pytest.skip("the number of sched_getattr is not known here")
    code = f"""
import ctypes, os, struct, sys
import torch
from pagewire.kernels.cpu import build
from pagewire.kernels.cpu.dense import NativeMatrix
from pagewire.kernels.cpu.library import Kernels

def slices():
    found = set()
    for thread in map(int, os.listdir("/proc/self/task")):
        own = ctypes.create_string_buffer(48)
        assert not ctypes.CDLL(None).syscall({call}, thread, own, 48, 0)
        found.add(struct.unpack_from("<IIQiIQ", own)[-1])
    return found

torch.set_num_threads(int(sys.argv[1]))
kernels = Kernels(build.find().load())
before = slices()
NativeMatrix(kernels, torch.randn(512, 512)).product(torch.randn(4, 512), None)
print(*before, *slices())
"""
    for threads, expected in ((1, None), (3, 200_000)):
        command = [sys.executable, "-c", code, str(threads)]
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=600)
        before, *after = map(int, done.stdout.split())
        if not before:
            pytest.skip("this kernel has no slices of a thread's own")
        assert after == [expected or before]
