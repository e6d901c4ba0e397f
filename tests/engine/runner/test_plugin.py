"""What a runner plugin is told at the start, and with which models and settings it is refused."""

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from runner_driver import engine_config

from pagewire.engine.runner.runner import Runner
from pagewire.errors import ConfigError

SOURCE = """
from pagewire import RunnerPlugin

class Base(RunnerPlugin):
    api_version = 1
    told = None

    def on_load(self, model):
        Base.told = model
        Base.embedding = model.weights["model.embed_tokens.weight"]
        assert "no such tensor" not in model.weights and len(model.weights) == len(list(model.weights))

class Unloadable(RunnerPlugin):
    api_version = 1

    def on_load(self, model):
        raise KeyError("lm_head.bias")

class Layers(Base):
    def after_layer(self, layer, hidden, step):
        return None

class Skipping(Base):
    def layers_to_skip(self, args):
        return ()

class Private(Base):
    shared_kv = "none"
"""


@pytest.fixture(autouse=True)
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "plugins_of_runner.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(str(tmp_path))


def load(folder: Path, plugin: str, **flags: object) -> Runner:
    return Runner.load(engine_config(folder, runner_plugin=f"plugins_of_runner:{plugin}", **flags))


def test_a_plugin_is_told_of_the_model(checkpoint: Callable[..., Path]) -> None:
    runner = load(checkpoint("qwen3"), "Base")
    module: Any = importlib.import_module("plugins_of_runner")
    told = module.Base.told
    assert (told.architecture, told.num_layers, told.hidden_size, told.vocab_size) == ("Qwen3ForCausalLM", 3, 64, 320)
    assert (told.dtype, told.device, told.rank, told.num_ranks) == (torch.float32, torch.device("cpu"), 0, 1)
    assert module.Base.embedding.shape == (320, 64)
    assert not runner.keys_by_args


@pytest.mark.parametrize(
    ("kind", "plugin", "sentence"),
    [
        ("qwen3", "Unloadable", "plugins_of_runner:Unloadable: on_load failed .KeyError: 'lm_head.bias'."),
        ("qwen3", "Private", "its requests cannot share cached KV; give --no-enable-prefix-caching as well"),
        ("qwen3", "Skipping", 'skips layers, so its shared_kv must be "equal args" or "none"'),
        ("persimmon", "Layers", "transformers computes PersimmonForCausalLM as a whole"),
    ],
)
def test_what_a_plugin_cannot_have(kind: str, plugin: str, sentence: str, checkpoint: Callable[..., Path]) -> None:
    with pytest.raises(ConfigError, match=sentence):
        load(checkpoint(kind), plugin)


def test_what_a_plugin_can_have(checkpoint: Callable[..., Path]) -> None:
    load(checkpoint("qwen3"), "Private", enable_prefix_caching=False)
    load(checkpoint("persimmon"), "Base")
