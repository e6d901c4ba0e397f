"""Loading a runner: its progress, and the errors if it fails."""

import os
import subprocess
import sys

import checkpoints
import pytest
import torch
from quantized_checkpoints import quantize_checkpoint

from pagewire.engine.runner.runner import Runner
from pagewire.errors import CheckpointError, ConfigError


def test_progress_rises_and_ends_at_the_total(checkpoint, resolved):
    reports = []
    Runner.load(resolved(checkpoint("qwen3")), progress=lambda done, total: reports.append((done, total)))
    assert [done for done, _ in reports] == sorted(done for done, _ in reports)
    assert reports[-1][0] == reports[-1][1] > 0


_LOAD = """
import os, sys
from pathlib import Path
from runner_driver import engine_config
from pagewire.engine.runner.runner import Runner
from pagewire.procs.weight_memory import new_segments
config = engine_config(Path(sys.argv[1]), quantization=sys.argv[2] or None)
Runner.load(config, weights_fd=(new_segments(config) or [-1])[0])
print(sorted({"sympy", "torch._dynamo"} & set(sys.modules)))
"""


@pytest.mark.slow
@pytest.mark.parametrize("quantization", ["", "int4"])
def test_a_start_imports_nothing_that_takes_a_second(quantization, checkpoint):
    """torch imports sympy for some operations on tensors without memory."""
    command = [sys.executable, "-c", _LOAD, str(checkpoint("qwen3")), quantization]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment, timeout=120)
    assert done.stdout == "[]\n"


@pytest.mark.parametrize("kind", ["llama", "persimmon"])
def test_a_damaged_file_is_named_by_native_models_and_the_fallback(kind, checkpoint, resolved, tmp_path):
    folder = checkpoints.make_checkpoint(tmp_path, kind)
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-50])
    with pytest.raises(CheckpointError, match=r"model\.safetensors is damaged or cut short"):
        Runner.load(resolved(folder))


@pytest.mark.usefixtures("c_kernels")
@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_the_note_says_where_quantized_weights_are_widened(family, checkpoint, resolved, tmp_path):
    folder, _ = quantize_checkpoint(checkpoint(family), tmp_path, "awq")
    kept, widened = (Runner.load(resolved(folder, cpu_kernels=kernels)) for kernels in ("auto", "torch"))
    assert any(note.endswith("; a checkpoint of 4 bits (awq)") for note in kept.notes)
    assert any(note.endswith("; a checkpoint of 4 bits (awq), widened") for note in widened.notes)
    assert kept.memory.weights < 0.5 * widened.memory.weights


def test_cuda_without_a_device_is_refused(checkpoint, resolved, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="no CUDA device"):
        Runner.load(resolved(checkpoint("llama"), device="cuda"))
