"""A GPU's weights outlive the worker that loaded them, in a real server: its keeper is a process, and workers are
killed. The device is a CPU with the kernels in Triton's interpreter, and the keeper's memory is the host's."""

import json
import os
import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import checkpoints
import httpx
import psutil
import pytest
import torch
import vocabulary
from waiting import until

from pagewire.config.machine import OVERRIDES
from pagewire.tools.servers import Server

TESTS = Path(__file__).resolve().parents[1]
pytestmark = [
    pytest.mark.e2e,
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("triton") is None or not hasattr(os, "memfd_create"), reason="no triton or memfd"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="the host's memory takes the place of a GPU's"),
]
ASK: dict[str, Any] = {"prompt": "one", "max_tokens": 12, "temperature": 0, "ignore_eos": True}
SMALL = ("--max-num-batched-tokens", "32", "--max-num-seqs", "2", "--max-model-len", "64", "--kv-cache-memory", "1M")
_MEMORY = "/memfd:pagewire-kept-weights"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = checkpoints.make_checkpoint(tmp_path / "model", "qwen3", num_hidden_layers=1)
    vocabulary.add_tokenizer(folder)
    return folder


@pytest.fixture
def server(folder: Path, tmp_path: Path) -> Iterator[Server]:
    path = os.pathsep.join([str(TESTS / "kept_site"), str(TESTS), *sys.path])
    facts = json.loads(os.environ.get(OVERRIDES, "{}")) | {"has_gpu": True, "gpu_capability": 90}
    environment = {
        "PYTHONPATH": path,
        OVERRIDES: json.dumps(facts),
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
    }
    server = Server(tmp_path / "run", str(folder), "--dtype", "float32", *SMALL, environment=environment)
    yield server.wait_ready()
    server.close()


def mapped(process: psutil.Process) -> set[str]:
    """The inodes of the keeper's memory that a process has mapped."""
    lines = Path(f"/proc/{process.pid}/maps").read_text().splitlines()
    return {line.split()[4] for line in lines if _MEMORY in line}


def held(keeper: psutil.Process) -> set[str]:
    """The inodes of the memory that it holds."""
    return {str(fd.stat().st_ino) for fd in Path(f"/proc/{keeper.pid}/fd").iterdir() if _MEMORY in os.readlink(fd)}


def answer(server: Server) -> str:
    return str(httpx.post(f"{server.url}/v1/completions", json=ASK, timeout=120).json()["choices"][0]["text"])


def streamed(server: Server, at_token: Callable[[int], None]) -> str:
    text: list[str] = []
    with httpx.stream("POST", f"{server.url}/v1/completions", json={**ASK, "stream": True}, timeout=120) as stream:
        for line in stream.iter_lines():
            if line.startswith("data: {"):
                text += [choice["text"] for choice in json.loads(line[6:])["choices"]]
                at_token(len(text))
    return "".join(text)


def replaced(server: Server, kind: str, old: psutil.Process) -> psutil.Process:
    until(lambda: server.of_kind(kind) not in ([], [old]) and server.answers("/ready"), f"the {kind} is replaced", 120)
    return server.of_kind(kind)[0]


@pytest.mark.long
def test_a_replaced_worker_maps_the_weights(folder: Path, server: Server) -> None:
    """The checkpoint holds zeros by then, so a worker that reads it would go on with other tokens."""
    expected = answer(server)
    assert "a keeper process holds the weights" in server.announced()
    (worker,), (keeper,) = server.of_kind("worker"), server.of_kind("weight keeper")
    memory = mapped(worker)
    assert memory == held(keeper) != set() and not mapped(keeper)
    checkpoints.damage(folder)

    def kill(num: int) -> None:
        if num == 5:
            worker.kill()

    assert streamed(server, kill) == expected
    second = replaced(server, "worker", worker)
    assert mapped(second) == memory and server.of_kind("weight keeper") == [keeper]
    # The keeper ends: its worker goes on, and the next one reads the checkpoint into the memory of another keeper.
    keeper.kill()
    successor = replaced(server, "weight keeper", keeper)
    assert answer(server) == expected and mapped(second) == memory
    assert "the weight keeper of rank 0 has ended" in server.log.read_text()
    second.kill()
    third = replaced(server, "worker", second)
    assert answer(server) != expected and mapped(third) == held(successor) != memory
    processes = [third, successor]
    server.kill()
    until(lambda: not any(process.is_running() for process in processes), "nothing is left", 30)
