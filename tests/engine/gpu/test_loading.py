"""Loading a GPU runner: its notes, and models and flags that the Triton kernels do not support."""

import pytest
import torch
from runner_driver import engine_config

from pagewire.engine.device.queue import EagerQueue
from pagewire.engine.runner.runner import Runner
from pagewire.errors import ConfigError

QUEUE = None if torch.cuda.is_available() else EagerQueue(torch.device("cpu"))


def _load(folder, **flags):
    return Runner.load(engine_config(folder, **flags), queue=QUEUE)


def test_the_memory_note_names_every_part(checkpoint):
    notes = _load(checkpoint("llama", num_hidden_layers=1), max_num_seqs=4).notes
    assert notes[0].startswith("Triton kernels")
    assert all(f"{part} " in notes[1] for part in ("weights", "workspace", "graphs", "KV cache")), notes


@pytest.mark.parametrize(
    ("kind", "changes", "why"),
    [
        ("persimmon", {}, "PersimmonForCausalLM runs in transformers"),
        ("llama", {"head_dim": 1024}, "no attention with keys of 1024 numbers"),
    ],
)
def test_unsupported_models_run_on_torch(kind, changes, why, checkpoint):
    assert why in _load(checkpoint(kind, **changes), max_num_seqs=4).notes[0]


def test_too_many_rows_are_refused(checkpoint):
    with pytest.raises(ConfigError, match="at most 2048 requests at once"):
        _load(checkpoint("llama", num_hidden_layers=1), max_num_seqs=4096)
