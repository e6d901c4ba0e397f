"""How a checkpoint is served: what is said before anything is loaded is true of the loaded model."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import families
import pytest
import torch
from msgspec import structs

from pagewire.config.config import EngineConfig
from pagewire.engine.checkpoint.spec import read_spec
from pagewire.engine.executors.native import NativeModel, in_torch
from pagewire.engine.models.in_c import lacks
from pagewire.engine.runner.loading import HostModel
from pagewire.engine.runner.runner import Runner
from pagewire.engine.runner.served import Served, how_served
from pagewire.errors import ConfigError

CPU = torch.device("cpu")


def served(config: EngineConfig) -> Served:
    return how_served(config, read_spec(Path(config.model.path)), CPU, has_triton=False)


@pytest.mark.parametrize("kind", ["llama", "gpt_oss", "deepseek_v3", "bloom", "gemma4_text", "minimax_m2"])
def test_the_operations_in_torch_are_those_of_the_loaded_model(
    kind: str, resolved: Callable[..., EngineConfig], tmp_path: Path
) -> None:
    config = resolved(families.make_family(tmp_path, kind), dtype="float32")
    found = served(config)
    assert found.executor == "C" and found.page.startswith("engine/models/families/")
    runner = Runner.load(config)
    runner.open_cache(8)
    assert isinstance(runner._model, HostModel) and isinstance(runner._model.model, NativeModel)
    assert runner._cache is not None
    attention: Any = runner._model.backend.attention(runner._cache)
    names = dict.fromkeys(lacks(op.args) for op in in_torch(runner._model.model, attention))
    assert found.in_torch == tuple(names)
    assert found.note in runner.notes
    if kind == "llama":
        assert not found.in_torch


def test_a_gpu_that_a_kernel_does_not_fit_takes_others(
    checkpoint: Callable[..., Path], resolved: Callable[..., EngineConfig]
) -> None:
    """By the table of what was compiled; the device is none of this machine's."""
    config = resolved(checkpoint("llama"), dtype="float32")
    spec = read_spec(Path(config.model.path))
    small = how_served(config, spec, CPU, has_triton=True, capability=89)
    assert small.executor == "Triton" and small.unfused.endswith("shared memory, and sm_89 has 101,376")
    assert f"cuBLAS computes all products, because {small.unfused}" in small.note
    large = how_served(config, spec, CPU, has_triton=True, capability=90)
    assert large.executor == "Triton" and not large.unfused and "cuBLAS" not in large.note


def test_deterministic_products_need_shared_memory(
    checkpoint: Callable[..., Path], resolved: Callable[..., EngineConfig]
) -> None:
    config = structs.replace(resolved(checkpoint("llama"), dtype="float32"), deterministic=True)
    spec = read_spec(Path(config.model.path))
    with pytest.raises(ConfigError, match=r"such products in float32 needs .* Choose --dtype bfloat16"):
        how_served(config, spec, CPU, has_triton=True, capability=89)
    assert how_served(config, spec, CPU, has_triton=True, capability=90).executor == "Triton"


def test_the_lines_of_a_described_model(checkpoint: Callable[..., Path], resolved: Callable[..., EngineConfig]) -> None:
    config = resolved(checkpoint("llama"), cpu_kernels="torch")
    first, note, groups = served(config).lines(config)
    assert first == "LlamaForCausalLM, described in engine/models/families/llama.py"
    assert note.startswith("kernels of torch") and groups == "cache groups: full"


def test_the_lines_of_other_models(
    checkpoint: Callable[..., Path], resolved: Callable[..., EngineConfig], tmp_path: Path
) -> None:
    config = resolved(checkpoint("persimmon"))
    first, _, groups = served(config).lines(config)
    assert first == "PersimmonForCausalLM, computed by transformers, because pagewire does not describe this family"
    assert groups == "cache groups: full"
    config = resolved(checkpoint("llama", hidden_act="mish"))
    first = served(config).lines(config)[0]
    covers = "pagewire's description of this family does not cover the activation 'mish'"
    assert first == f"LlamaForCausalLM, computed by transformers, because {covers}"


def test_an_old_gpu_takes_the_kernels_of_torch(
    checkpoint: Callable[..., Path], resolved: Callable[..., EngineConfig]
) -> None:
    config = resolved(checkpoint("llama"), dtype="float32")
    spec = read_spec(Path(config.model.path))
    gpu = torch.device("cuda")  # torch does not look for it here

    def on(capability: int, config: EngineConfig = config) -> Served:
        return how_served(config, spec, gpu, has_triton=True, capability=capability)

    assert on(80).executor == on(120).executor == "Triton"
    old = on(75)
    assert old.executor == "torch"
    assert "because they need compute capability 8.0, and this GPU has 7.5" in old.note
    fp8 = structs.replace(config, kv_cache_dtype="fp8")
    assert on(89, fp8).executor == "Triton"
    for capability, why in ((86, "8.9 or newer, and this one has 8.6"), (75, "8.0, and this GPU has 7.5")):
        with pytest.raises(ConfigError, match=why):
            on(capability, fp8)
