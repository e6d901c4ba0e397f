"""Packed weights outlive the worker that packed them, and engines of one launch share them. Real processes."""

import json
import os
import re
import shutil
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import checkpoints
import httpx
import psutil
import pytest
import quantized_checkpoints
import vocabulary
from defaults import COMPILED, machine
from waiting import until

from pagewire.tools.make_checkpoint import make_checkpoint
from pagewire.tools.servers import Server

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.usefixtures("compiled")]

Start = Callable[..., Server]
ASK: dict[str, Any] = {"prompt": "Once upon a time", "max_tokens": 300, "temperature": 0, "ignore_eos": True}
_SEGMENT = "/memfd:pagewire-weights"


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> Any:
    with machine(COMPILED):
        yield


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_checkpoint(tmp_path / "model", "qwen3-tiny", weights=True)
    return tmp_path / "model"


def mapped(process: psutil.Process) -> set[str]:
    """The inodes of the segments that a process has mapped."""
    lines = Path(f"/proc/{process.pid}/maps").read_text().splitlines()
    return {line.split()[4] for line in lines if _SEGMENT in line}


def holders() -> set[int]:
    """The processes of this machine that have a segment open or mapped."""
    found = set()
    for pid in psutil.pids():
        try:
            links = [os.readlink(link) for link in Path(f"/proc/{pid}/fd").iterdir()]
            maps = Path(f"/proc/{pid}/maps").read_text()
        except OSError:
            continue
        if _SEGMENT in maps or any(_SEGMENT in link for link in links):
            found.add(pid)
    return found


def answer(server: Server) -> str:
    text = httpx.post(f"{server.url}/v1/completions", json=ASK, timeout=60).json()["choices"][0]["text"]
    return str(text)


def streamed(server: Server, at_token: Callable[[int], None]) -> str:
    """The text of a stream. at_token: called with the number of chunks so far."""
    text: list[str] = []
    with httpx.stream("POST", f"{server.url}/v1/completions", json={**ASK, "stream": True}, timeout=60) as stream:
        for line in stream.iter_lines():
            if line.startswith("data: {"):
                text += [choice["text"] for choice in json.loads(line[6:])["choices"]]
                at_token(len(text))
    return "".join(text)


def replaced(server: Server, old: psutil.Process) -> psutil.Process:
    until(
        lambda: server.of_kind("worker") not in ([], [old]) and server.answers("/ready"), "the worker is replaced", 60
    )
    return server.of_kind("worker")[0]


def test_a_replaced_worker_maps_the_weights(folder: Path, start: Start) -> None:
    """The checkpoint holds zeros by then, so a worker that reads it would go on with other tokens."""
    server = start(str(folder), "--kv-cache-memory", "64M").wait_ready()
    expected = answer(server)
    worker = server.of_kind("worker")[0]
    segments = mapped(worker)
    assert len(segments) == 1
    checkpoints.damage(folder)

    def kill(num: int) -> None:
        if num == 20:
            worker.kill()

    assert streamed(server, kill) == expected
    successor = replaced(server, worker)
    assert successor.pid != worker.pid and mapped(successor) == segments
    assert answer(server) == expected
    assert not mapped(server.supervisor), "the supervisor holds the memory without mapping it"


@pytest.mark.long
def test_a_replaced_worker_maps_quantized_experts(tmp_path: Path, start: Start) -> None:
    source = checkpoints.make_checkpoint(tmp_path / "float", "mixtral")
    vocabulary.add_tokenizer(source)
    folder, _ = quantized_checkpoints.quantize_checkpoint(source, tmp_path, "awq")
    server = start(str(folder), "--kv-cache-memory", "64M").wait_ready()
    expected, worker = answer(server), server.of_kind("worker")[0]
    segments = mapped(worker)
    checkpoints.damage(folder)
    worker.kill()
    assert mapped(replaced(server, worker)) == segments and len(segments) == 1
    assert answer(server) == expected
    assert "a checkpoint of 4 bits (awq)" in (said := server.announced()) and "widened" not in said


def test_a_checkpoint_that_changed_is_packed_anew(folder: Path, start: Start) -> None:
    server = start(str(folder), "--kv-cache-memory", "64M").wait_ready()
    before = answer(server)
    first = server.of_kind("worker")[0]
    checkpoints.damage(folder, is_noticed=True)
    first.kill()
    second = replaced(server, first)
    assert mapped(second) == set() and "do not fit this checkpoint" in server.log.read_text()
    changed = answer(server)
    assert changed != before
    second.kill()
    third = replaced(server, second)
    assert len(mapped(third)) == 1, "it packed into new memory"
    third.kill()
    fourth = replaced(server, third)
    assert mapped(fourth) == mapped(fourth) != set() and answer(server) == changed
    assert server.log.read_text().count("do not fit this checkpoint") == 1


def test_engines_of_one_launch_share_their_weights(folder: Path, start: Start) -> None:
    launch = start(str(folder), "--kv-cache-memory", "64M", "--data-parallel-size", "2").wait_ready()

    def workers() -> list[psutil.Process]:
        return [process for name, process in sorted(launch.children().items()) if name.startswith("worker")]

    until(lambda: len(workers()) == 2 and all(map(mapped, workers())), "both have their weights", 60)
    first, second = workers()
    assert mapped(first) == mapped(second) and len(mapped(first)) == 1
    for worker in (first, second):  # nothing is private to a process
        rollup = Path(f"/proc/{worker.pid}/smaps").read_text()
        parts = re.findall(rf"{re.escape(_SEGMENT)}.*?Private_Dirty:\s+(\d+) kB", rollup, re.DOTALL)
        assert parts == ["0"]
    segments, pid = mapped(first), first.pid
    first.kill()
    until(lambda: len(workers()) == 2 and pid not in [worker.pid for worker in workers()], "it is replaced", 60)
    until(lambda: [mapped(worker) for worker in workers()] == [segments] * 2, "it maps the same weights", 60)


def test_ranks_have_a_segment_each(folder: Path, start: Start) -> None:
    server = start(str(folder), "--kv-cache-memory", "64M", "--tensor-parallel-size", "2").wait_ready()
    expected = answer(server)
    before = [mapped(worker) for worker in server.of_kind("worker")]
    assert len(before) == 2 and len(before[0] | before[1]) == 2
    checkpoints.damage(folder)
    victim = server.of_kind("worker")[1]
    victim.kill()
    until(lambda: victim not in server.of_kind("worker") and len(server.of_kind("worker")) == 2, "it is replaced", 60)
    until(lambda: server.answers("/ready"), "the engine is ready", 60)
    assert [mapped(worker) for worker in server.of_kind("worker")] == before and answer(server) == expected


def test_nothing_is_left_when_all_processes_are_killed(folder: Path, start: Start) -> None:
    server = start(str(folder), "--kv-cache-memory", "64M").wait_ready()
    those = {server.supervisor.pid, server.of_kind("worker")[0].pid}
    assert those <= holders()
    server.kill()
    until(lambda: not those & holders(), "the memory has no holder")


def test_the_worker_sleeps_with_its_weights(folder: Path, start: Start) -> None:
    admin = {"authorization": "Bearer of-the-administrator"}
    flags = ("--enable-sleep-mode", "--admin-api-key", "of-the-administrator", "--kv-cache-memory", "64M")
    server = start(str(folder), *flags).wait_ready()
    expected, worker = answer(server), server.of_kind("worker")[0]
    segments = mapped(worker)
    checkpoints.damage(folder)
    freed = httpx.post(f"{server.url}/sleep", headers=admin, timeout=60).json()["freed_bytes"]
    assert 60 << 20 < freed <= 64 << 20, "the KV cache alone"
    assert mapped(worker) == segments
    assert httpx.post(f"{server.url}/wake_up", headers=admin, timeout=60).json() == {"is_sleeping": False}
    assert answer(server) == expected


def test_a_template_that_dies_is_replaced_with_its_workers(folder: Path, start: Start) -> None:
    server = start(str(folder), "--kv-cache-memory", "64M").wait_ready()
    expected, worker = answer(server), server.of_kind("worker")[0]
    template = worker.parent()
    assert template is not None and template.parent() == server.supervisor
    lost = threading.Event()

    def kill(num: int) -> None:
        if num == 20 and not lost.is_set():
            lost.set()
            template.send_signal(signal.SIGKILL)

    assert streamed(server, kill) == expected
    assert replaced(server, worker).parent() != template
    shutil.rmtree(folder)  # nothing more is read
    assert server.stop() == 0
