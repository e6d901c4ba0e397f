"""The leak detector finds deliberate leaks, and none in a server without leaks."""

import subprocess
import sys
from collections.abc import Iterator

import psutil
import pytest

from pagewire.tests.stress import leak
from pagewire.tools.servers import MB, Holding, holding

# Serves one request per line. Each kind of server keeps 8 MB from the first requests, as a cache does.
SERVER = """
import sys, threading
kind, kept, cache = sys.argv[1], [], []
for i, line in enumerate(sys.stdin):
    if i < 400:
        cache.append(bytes(20_000))
    if kind == "memory":
        kept.append(bytes(bytearray(b"x" * 1000)))
    if kind == "descriptors" and i % 50 == 0:
        kept.append(open("/dev/null"))
    if kind == "threads" and i % 100 == 0:
        threading.Thread(target=threading.Event().wait, daemon=True).start()
    print(flush=True)
"""
NUM_LOOKS, STEP = 6, 500


@pytest.fixture
def slopes(request: pytest.FixtureRequest) -> Iterator[dict[str, leak.Slope]]:
    """The slopes of a server that leaks the resource that the test's parameter names."""
    process = subprocess.Popen(
        [sys.executable, "-c", SERVER, request.param], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdin is not None and process.stdout is not None
    looks = leak.Looks()
    for look in range(NUM_LOOKS):
        process.stdin.write(b"\n" * STEP)
        process.stdin.flush()
        for _ in range(STEP):
            process.stdout.readline()
        looks.add((look + 1) * STEP, {"server": holding(psutil.Process(process.pid))})
    process.stdin.close()
    process.stdout.close()
    process.kill()
    process.wait()
    yield looks.slopes()


@pytest.mark.parametrize("slopes", ["nothing"], indirect=True)
def test_a_full_cache_is_no_leak(slopes: dict[str, leak.Slope]) -> None:
    assert leak.complaints(slopes) == []


@pytest.mark.parametrize("slopes", ["memory", "descriptors", "threads"], indirect=True)
def test_a_leak_is_found(slopes: dict[str, leak.Slope], request: pytest.FixtureRequest) -> None:
    kind = request.node.callspec.params["slopes"]
    (complaint,) = leak.complaints(slopes)
    assert {"memory": "MB", "descriptors": "descriptors", "threads": "threads"}[kind] in complaint
    if kind == "memory":
        assert 0.8 < slopes["server"].num_bytes / MB < 1.4


def test_a_single_step_is_no_leak_and_a_staircase_is_one() -> None:
    looks = leak.Looks()
    for i in range(10):
        step, staircase = 5 * MB * (i >= 2), 3 * MB * (i // 3)
        looks.add(1000 * i, {"step": Holding(step, 20, 4), "staircase": Holding(staircase, 20, 4)})
    (complaint,) = leak.complaints(looks.slopes())
    assert complaint.startswith("staircase")


def test_one_step_of_descriptors_is_no_leak_and_two_are() -> None:
    assert leak.without_step([31, 31, 33, 33]) == [31] * 4
    assert leak.without_step([31, 31, 33, 34]) == [31, 31, 31, 32]
    assert leak.without_step([31, 30, 29]) == [31, 31, 30]
    for num_steps in (1, 2):
        looks = leak.Looks()
        for i in range(21):
            looks.add(1000 * i, {"server": Holding(MB, 30 + 2 * sum(i >= at for at in (10, 11)[:num_steps]), 4)})
        assert bool(leak.complaints(looks.slopes())) == (num_steps == 2)
