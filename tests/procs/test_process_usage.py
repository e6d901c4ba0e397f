"""What Linux says of a process."""

import subprocess
import sys
from pathlib import Path

from pagewire.ipc.messages import ProcessUsage
from pagewire.procs.process_usage import available_bytes, usage_of

STATUS = """Name:\tpagewire: worker
State:\tS (sleeping)
VmRSS:\t  283456 kB
RssAnon:\t  240372 kB
RssFile:\t   39060 kB
RssShmem:\t    3784 kB
Threads:\t4
voluntary_ctxt_switches:\t80
"""


def test_the_fields_of_linux_are_read() -> None:
    assert usage_of(STATUS, 2.5) == ProcessUsage(2.5, 4, 240372 << 10, 39060 << 10, 3784 << 10)
    assert usage_of("Threads:\t4\n", 2.5) == ProcessUsage(2.5, 4), "what a system lacks is 0"


PROGRAM = """
import threading
from pagewire.procs.process_usage import process_usage

before, stop = process_usage(), threading.Event()
thread = threading.Thread(target=stop.wait)
thread.start()
held = bytearray(b"x" * (64 << 20))
after = process_usage()
stop.set()
assert after.num_threads == before.num_threads + 1 and after.cpu_s > before.cpu_s > 0, (before, after)
assert after.anonymous_bytes >= before.anonymous_bytes + len(held) // 2 and after.file_bytes > 0, (before, after)
"""


def test_a_process_has_its_threads_memory_and_time() -> None:
    """One of its own: that of the tests frees memory meanwhile."""
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_available_is_the_less_of_the_machine_and_the_cgroup_without_its_file_cache(tmp_path: Path) -> None:
    memory = tmp_path / "meminfo"
    assert available_bytes(memory, tmp_path) == 0
    memory.write_text("MemTotal:       8000 kB\nMemAvailable:   5000 kB\n")
    assert available_bytes(memory, tmp_path) == 5000 << 10, "there is no cgroup"
    (tmp_path / "memory.current").write_text("900000\n")
    (tmp_path / "memory.stat").write_text("anon 500000\ninactive_file 300000\n")
    (tmp_path / "memory.max").write_text("max\n")
    assert available_bytes(memory, tmp_path) == 5000 << 10, "it has no limit"
    (tmp_path / "memory.max").write_text("1000000\n")
    assert available_bytes(memory, tmp_path) == 400_000
    (tmp_path / "memory.max").write_text("500000\n")
    assert available_bytes(memory, tmp_path) == 0
