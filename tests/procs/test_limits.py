"""Time and memory limits, each in a process of its own: signals and limits would otherwise apply to pytest."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
HEAD = """
import os, signal, time
from pagewire.procs.limits import CpuLimit, OutOfTime, limit_memory
limit = CpuLimit()
def spin(seconds):
    until = time.process_time() + seconds
    while time.process_time() < until:
        pass
def stuck():  # one call into C, which handles no signals
    one, other = ([[["x"] * 9999] * 9999] * 9999 for _ in range(2))
    return one == other
"""


def run(code: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(ROOT / ".typing")}
    return subprocess.run(
        [sys.executable, "-c", HEAD + code], capture_output=True, text=True, env=environment, check=False
    )


def test_python_code_over_its_cpu_limit_is_stopped_and_the_process_goes_on() -> None:
    result = run("""
for _ in range(3):
    try:
        limit.within(0.1, lambda: spin(10))
    except OutOfTime:
        print("stopped")
print(limit.within(0.5, lambda: "done"))
spin(0.7)  # no limit is left behind
time.sleep(0.2)
try:
    limit.within(0.5, lambda: 1 / 0)
except ZeroDivisionError:
    print("as it is")
""")
    assert result.stdout.split("\n") == ["stopped"] * 3 + ["done", "as it is", ""], result.stderr


def test_waiting_does_not_count_against_the_cpu_limit() -> None:
    assert run("print(limit.within(0.1, lambda: time.sleep(0.4) or 'awake'))").stdout == "awake\n"


def test_a_process_stuck_in_one_call_is_killed_by_the_kernel() -> None:
    assert run("limit.within(0.1, stuck)").returncode == -signal.SIGXCPU


@pytest.mark.parametrize("code", ["'x' * 10**9", "[0] * 10**9", "'%0999999999d' % 1", "list(range(10**9))"])
def test_an_allocation_over_the_memory_limit_raises_memory_error(code: str) -> None:
    result = run(f"""
limit_memory(64 << 20)
try:
    {code}
except MemoryError:
    print("too much", len(bytearray(16 << 20)))
""")
    assert result.stdout == "too much 16777216\n", result.stderr
