"""A runner that cannot be loaded says why, and says how far it is."""

import checkpoints
import pytest
import torch

from pagewire.engine.runner.runner import Runner
from pagewire.errors import CheckpointError, ConfigError


def test_progress_and_its_end(checkpoint, resolved):
    told = []
    Runner.load(resolved(checkpoint("qwen3")), progress=lambda done, total: told.append((done, total)))
    assert [done for done, _ in told] == sorted(done for done, _ in told)
    assert told[-1][0] == told[-1][1] > 0


@pytest.mark.parametrize("kind", ["llama", "phi3"])
def test_damaged_files_are_named_native_or_not(kind, checkpoint, resolved, tmp_path):
    folder = checkpoints.make_checkpoint(tmp_path, kind)
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-50])
    with pytest.raises(CheckpointError, match=r"model\.safetensors is damaged or cut short"):
        Runner.load(resolved(folder))


def test_cuda_without_a_device(checkpoint, resolved, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="no CUDA device"):
        Runner.load(resolved(checkpoint("llama"), device="cuda"))
