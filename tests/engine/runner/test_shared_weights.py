"""Weights in shared memory: the first runner packs them, the next ones map them and read no tensor."""

import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import checkpoints
import pytest
from quantized_checkpoints import quantize_checkpoint
from runner_driver import Driver, Request, engine_config
from waiting import until

from pagewire.engine.runner.runner import Runner
from pagewire.engine.weights.segment import is_open
from pagewire.procs.weight_memory import close_segments, new_segment

pytestmark = [
    pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="no memfd"),
    pytest.mark.usefixtures("c_kernels"),
]

PROMPTS = ([5, 6, 7, 8], [9] * 20)


@pytest.fixture
def fd() -> Iterator[int]:
    fd = new_segment()
    yield fd
    close_segments([fd])


def load(folder: Path, fd: int, **flags: Any) -> tuple[Runner, list[list[int]]]:
    """A runner, and its greedy tokens."""
    runner = Runner.load(engine_config(folder, **flags), weights_fd=fd)
    runner.open_cache(64)
    requests = [Request(prompt) for prompt in PROMPTS]
    Driver(runner, 64).run(requests)
    return runner, [request.output for request in requests]


@pytest.mark.parametrize("quantization", [None, "int8"])
@pytest.mark.parametrize("kind", ["qwen3", "llama", "llama-biased", "qwen3_moe-sparse", "mixtral"])
def test_the_second_runner_reads_no_tensor(
    kind: str, quantization: str | None, fd: int, checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    folder = shutil.copytree(checkpoint(kind), tmp_path / "model")
    alone, expected = load(folder, -1, quantization=quantization)
    first, tokens = load(folder, fd, quantization=quantization)
    assert tokens == expected and first.weights_fit and not is_open(fd)
    assert first.memory == alone.memory
    checkpoints.damage(folder)
    second, tokens = load(folder, fd, quantization=quantization)
    assert tokens == expected and second.weights_fit and second.memory == alone.memory
    assert load(folder, -1, quantization=quantization)[1] != expected, "a runner that reads the checkpoint notices"


@pytest.mark.parametrize("kind", ["awq", "gptq-v2-ordered", "int8", "mxfp4", "fp8-channel"])
@pytest.mark.parametrize("family", ["qwen3", "mixtral"])
def test_quantized_checkpoints_are_packed_once(
    family: str, kind: str, fd: int, checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    quantized, widened = quantize_checkpoint(checkpoint(family, hidden_size=128, intermediate_size=128), tmp_path, kind)
    alone, expected = load(quantized, -1)
    first, tokens = load(quantized, fd)
    assert tokens == expected and first.memory == alone.memory
    size = os.fstat(fd).st_size
    assert size == pytest.approx(first.memory.weights, rel=0.1, abs=64 << 10), "the segment holds what is counted"
    assert size < 0.45 * sum(file.stat().st_size for file in widened.glob("*.safetensors"))
    checkpoints.damage(quantized)
    second, tokens = load(quantized, fd)
    assert tokens == expected and second.weights_fit and second.memory == alone.memory


def test_a_changed_checkpoint_is_read_again(
    fd: int, checkpoint: Callable[..., Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = shutil.copytree(checkpoint("qwen3"), tmp_path / "model")
    before = load(folder, fd)[1]
    checkpoints.damage(folder)
    os.utime(folder / "model.safetensors")
    expected = load(folder, -1)[1]
    runner, tokens = load(folder, fd)
    assert tokens == expected != before
    assert not runner.weights_fit and "do not fit this checkpoint" in caplog.text


def test_other_options_other_ranks_and_other_models_do_not_fit(fd: int, checkpoint: Callable[..., Path]) -> None:
    load(checkpoint("qwen3"), fd)
    assert load(checkpoint("qwen3"), fd)[0].weights_fit
    for folder, flags in (
        (checkpoint("qwen3"), {"quantization": "int8"}),
        (checkpoint("qwen3"), {"dtype": "bfloat16"}),
        (checkpoint("llama"), {}),
    ):
        runner, tokens = load(folder, fd, **flags)
        assert not runner.weights_fit and tokens == load(folder, -1, **flags)[1]


def test_engines_with_other_limits_share_the_weights(fd: int, checkpoint: Callable[..., Path]) -> None:
    folder = checkpoint("qwen3")
    _, expected = load(folder, fd, served_model_name=["a"])
    for flags in ({"served_model_name": ["b"]}, {"max_num_seqs": 9}, {"max_model_len": 100}):
        runner, tokens = load(folder, fd, **flags)
        assert runner.weights_fit and tokens == expected


def test_kernels_of_torch_leave_the_segment_alone(fd: int, checkpoint: Callable[..., Path]) -> None:
    runner, _ = load(checkpoint("qwen3"), fd, cpu_kernels="torch")
    assert runner.weights_fit and is_open(fd) and os.fstat(fd).st_size == 0


def test_a_foreign_descriptor_is_not_used(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    with (tmp_path / "file").open("w+b") as file:
        file.write(b"pagewire" * 1000)
        file.flush()
        runner, tokens = load(checkpoint("qwen3"), file.fileno())
        assert not runner.weights_fit and tokens == load(checkpoint("qwen3"), -1)[1]
        assert (tmp_path / "file").read_bytes() == b"pagewire" * 1000


def test_random_weights_are_packed_once_too(fd: int, checkpoint: Callable[..., Path]) -> None:
    expected = load(checkpoint("qwen3"), -1, load_format="dummy")[1]
    for _ in range(2):
        runner, tokens = load(checkpoint("qwen3"), fd, load_format="dummy")
        assert runner.weights_fit and tokens == expected


_PACKER = """
import fcntl, os, sys
fd = int(sys.argv[1])
fcntl.flock(os.open(f"/proc/self/fd/{fd}", os.O_RDWR), fcntl.LOCK_EX)
os.ftruncate(fd, 12345)
print("locked", flush=True)
sys.stdin.read()
"""


def test_a_runner_waits_for_the_process_that_packs(fd: int, checkpoint: Callable[..., Path]) -> None:
    """That process dies before it has finished."""
    folder = checkpoint("qwen3")
    command = [sys.executable, "-c", _PACKER, str(fd)]
    packer = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, pass_fds=[fd])
    assert packer.stdout is not None and packer.stdout.readline() == b"locked\n"
    loaded: list[tuple[Runner, list[list[int]]]] = []
    thread = threading.Thread(target=lambda: loaded.append(load(folder, fd)))
    thread.start()
    inode = f":{os.fstat(fd).st_ino} "
    waits = lambda: any("->" in line and inode in line for line in Path("/proc/locks").read_text().splitlines())  # noqa: E731
    until(waits, "the runner waits for the lock", 60.0)
    assert not loaded and os.fstat(fd).st_size == 12345
    packer.kill()
    packer.communicate()
    thread.join()
    assert loaded[0][0].weights_fit and not is_open(fd)
