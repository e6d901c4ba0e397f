"""Checkpoints with a LoRA adapter: the tensors, the tokens, and adapters that do not fit."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import checkpoints
import families
import programs
import pytest
import torch
from defaults import COMPILED, machine
from runner_driver import Driver, Request
from safetensors.torch import load_file, save_file

from pagewire.config.flags import make_config
from pagewire.engine.runner.runner import Runner
from pagewire.engine.weights.adapter import AdaptedReader
from pagewire.errors import CheckpointError, ConfigError
from pagewire.procs.prepare import prepare

RANK = 4
_PROMPTS = [[5, 6, 7, 8], list(range(20, 60)), [300]]


def weights_of(base: Path, ending: str) -> list[str]:
    """Its matrices with such a name, without `.weight`."""
    found = [name.removesuffix(".weight") for name in load_file(base / "model.safetensors")]
    return sorted(name for name in found if name.endswith(ending))


def make_adapter(folder: Path, base: Path, modules: list[str], *, is_transposed: bool = False, **fields: Any) -> Path:
    """An adapter with large random weights for the named modules."""
    folder.mkdir()
    generator, tensors = torch.Generator().manual_seed(3), {}
    shapes = {name: tensor.shape for name, tensor in load_file(base / "model.safetensors").items()}
    for module in modules:
        n, k = shapes[f"{module}.weight"][::-1] if is_transposed else shapes[f"{module}.weight"]
        rank = fields.get("rank_pattern", {}).get(module.rpartition(".")[2], RANK)
        for name, shape in (("lora_A", (rank, k)), ("lora_B", (n, rank))):
            tensors[f"base_model.model.{module}.{name}.weight"] = torch.randn(shape, generator=generator) * 0.3
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "base_model_name_or_path": str(base), "r": RANK, "lora_alpha": 6}
    config |= {"fan_in_fan_out": is_transposed, **fields}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def merged(base: Path, adapter: Path, folder: Path, scale: Callable[[str], float]) -> Path:
    """The checkpoint with the adapter's products added to its tensors."""
    folder.mkdir()
    (folder / "config.json").write_text((base / "config.json").read_text())
    tensors, changes = load_file(base / "model.safetensors"), load_file(adapter / "adapter_model.safetensors")
    is_transposed = json.loads((adapter / "adapter_config.json").read_text())["fan_in_fan_out"]
    for key, a in changes.items():
        if ".lora_A." in key:
            module = key.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
            delta = scale(module) * (changes[key.replace("lora_A", "lora_B")] @ a)
            tensors[f"{module}.weight"] += delta.t() if is_transposed else delta
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize(
    ("kind", "ending", "fields"),
    [
        ("llama", "_proj", {}),
        ("qwen3_moe", "down_proj", {"use_rslora": True}),
        ("phi3", "qkv_proj", {"alpha_pattern": {r"^model\.layers\.0\.mlp": 9.0, "self_attn.qkv_proj": 2.0}}),
        ("gpt2", "c_attn", {"is_transposed": True}),
        ("mamba2", "in_proj", {"rank_pattern": {"in_proj": 2}}),
    ],
)
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_program_gets_the_sums(kind, ending, fields, ranks, tmp_path):
    (tmp_path / "base").mkdir()
    make = families.make_family if kind == "gpt2" else checkpoints.make_checkpoint
    base = make(tmp_path / "base", kind)
    modules = weights_of(base, ending)
    assert modules
    adapter = make_adapter(tmp_path / "adapter", base, modules, **fields)
    scale = {"qwen3_moe": 6 / RANK**0.5, "phi3": 2 / RANK, "mamba2": 6 / 2}.get(kind, 6 / RANK)
    expected = merged(base, adapter, tmp_path / "merged", lambda module: scale)
    for rank in range(ranks):
        want = programs.load(expected, rank=rank, size=ranks).tensors
        found = programs.load(base, rank=rank, size=ranks, adapter=str(adapter)).tensors
        plain = programs.load(base, rank=rank, size=ranks).tensors
        assert found.keys() == want.keys()
        for key, tensor in want.items():
            torch.testing.assert_close(found[key], tensor, rtol=1e-5, atol=1e-6)
        assert any(not torch.equal(found[key], plain[key]) for key in plain)


def test_an_adapter_is_served_as_a_model(tmp_path):
    """Its folder stands in for the model's. Two adapters and the base have different tokens and fingerprints."""
    base = checkpoints.make_checkpoint(tmp_path / "base", "qwen3")
    modules = weights_of(base, "_proj")
    adapter = make_adapter(tmp_path / "tuned", base, modules)
    expected = merged(base, adapter, tmp_path / "merged", lambda module: 6 / RANK)
    with machine(COMPILED):
        config = prepare(make_config(model=str(adapter), dtype="float32", threads=1, max_model_len=256))
        plain = prepare(make_config(model=str(base), dtype="float32", threads=1, max_model_len=256))
    assert (config.model.name, config.model.path) == ("tuned", str(base))
    assert config.model.fingerprint != plain.model.fingerprint
    runner = Runner.load(config)
    runner.open_cache(32)
    requests = [Request(prompt, max_new=12) for prompt in _PROMPTS]
    Driver(runner, 32).run(requests)
    assert [request.output for request in requests] == checkpoints.reference_greedy(expected, _PROMPTS, 12)
    assert [request.output for request in requests] != checkpoints.reference_greedy(base, _PROMPTS, 12)


def test_trained_modules_replace_those_of_the_base(tmp_path):
    base = checkpoints.make_checkpoint(tmp_path / "base", "llama")
    adapter = make_adapter(tmp_path / "adapter", base, weights_of(base, "q_proj"))
    file = adapter / "adapter_model.safetensors"
    head = torch.randn(load_file(base / "model.safetensors")["lm_head.weight"].shape)
    save_file({**load_file(file), "base_model.model.lm_head.weight": head}, file)
    with AdaptedReader(base, adapter) as reader:
        assert torch.equal(reader.tensor("lm_head.weight", slice(3, 9)), head[3:9])


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"peft_type": "IA3"}, "has the peft_type IA3; pagewire serves LORA"),
        ({"use_dora": True}, "has use_dora; merge the adapter into the model"),
        ({"alpha_pattern": {"(q|k)_proj": 2}}, r"the pattern \(q\|k\)_proj; pagewire reads the names of modules"),
        ({"bias": "all"}, "has bias = all; merge the adapter into the model"),
    ],
)
def test_other_adapters_are_refused(fields, error, tmp_path):
    base = checkpoints.make_checkpoint(tmp_path / "base", "llama")
    adapter = make_adapter(tmp_path / "adapter", base, weights_of(base, "q_proj"), **fields)
    with pytest.raises(ConfigError, match=error):
        AdaptedReader(base, adapter)


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (lambda t: t.pop(next(key for key in t if "lora_B" in key)), "lora_A.weight, but not .*lora_B.weight"),
        (
            lambda t: t.update({"base_model.model.x.lora_embedding_A": torch.zeros(2)}),
            "A and B of linear layers",
        ),
        (lambda t: t.update({"base_model.model.x.weight": torch.zeros(2)}), "changes x.weight, which the base model's"),
        (
            lambda t: t.update({"base_model.model.lm_head.weight": torch.zeros(2, 2)}),
            r"lm_head.weight changes \[2, 2\], but lm_head.weight is",
        ),
    ],
)
def test_adapters_that_do_not_fit_are_refused(change, error, tmp_path):
    base = checkpoints.make_checkpoint(tmp_path / "base", "llama")
    adapter = make_adapter(tmp_path / "adapter", base, weights_of(base, "q_proj"))
    file = adapter / "adapter_model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)
    with pytest.raises((CheckpointError, ConfigError), match=error):
        AdaptedReader(base, adapter)


def test_damaged_and_missing_files_are_reported(tmp_path):
    base = checkpoints.make_checkpoint(tmp_path / "base", "llama")
    adapter = make_adapter(tmp_path / "adapter", base, weights_of(base, "q_proj"))
    file = adapter / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-10])
    with pytest.raises(CheckpointError, match=r"adapter_model\.safetensors is damaged or cut short"):
        AdaptedReader(base, adapter)
    file.unlink()
    with pytest.raises(CheckpointError, match=r"adapter_model\.safetensors is missing"):
        AdaptedReader(base, adapter)
    (adapter / "adapter_config.json").write_text('{"base_model_name_or_path": "/nowhere/at/all"}')
    with pytest.raises(ConfigError, match="There is no folder /nowhere/at/all"):
        prepare(make_config(model=str(adapter)))
