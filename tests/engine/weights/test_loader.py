"""Loading checkpoints, good ones and ones with each kind of error."""

from pathlib import Path

import checkpoints
import pytest
import torch
from safetensors.torch import load_file, save_file

from pagewire.engine.checkpoint.spec import read_spec
from pagewire.engine.models import registry
from pagewire.engine.parallel.collectives import Alone
from pagewire.engine.weights.loader import load_weights
from pagewire.engine.weights.mapping import checkpoint_targets
from pagewire.engine.weights.reader import CheckpointReader
from pagewire.errors import CheckpointError
from pagewire.kernels.ops import reference_ops


def _load(folder: Path, dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    spec, ops = read_spec(folder), reference_ops()
    cpu = torch.device("cpu")
    model = registry.build_native(spec, max_len=8, dtype=dtype, weight_dtype=dtype, device=cpu, group=Alone(), ops=ops)
    registry.allocate(model, cpu)
    parameters = dict(model.named_parameters())
    with CheckpointReader(folder) as reader:
        targets = checkpoint_targets(parameters, model.fused, model.cuts, model.renamed)
        total = load_weights(reader, parameters, targets, redundant=model.redundant)
    assert total == sum(parameter.nbytes for parameter in parameters.values())
    assert model is not None
    return model


def _edit(folder: Path, change) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


@pytest.fixture
def folder(tmp_path):
    return checkpoints.make_checkpoint(tmp_path, "qwen3")


def test_every_parameter_is_filled(folder):
    model = _load(folder)
    tensors = load_file(folder / "model.safetensors")
    attention = model.model.layers[1].self_attn
    parts = [tensors[f"model.layers.1.self_attn.{x}_proj.weight"] for x in "qkv"]
    assert torch.equal(attention.qkv_proj.weight, torch.cat(parts))
    gate_up = [tensors[f"model.layers.2.mlp.{x}_proj.weight"] for x in ("gate", "up")]
    assert torch.equal(model.model.layers[2].mlp.gate_up_proj.weight, torch.cat(gate_up))
    assert model.lm_head is None


@pytest.mark.parametrize(
    ("kind", "block", "names"),
    [
        ("qwen3_moe", "mlp", ("gate_proj", "up_proj", "down_proj")),
        ("mixtral", "block_sparse_moe", ("w1", "w3", "w2")),
    ],
)
def test_experts_are_stacked_and_checked(kind, block, names, tmp_path):
    folder = checkpoints.make_checkpoint(tmp_path, kind)
    mlp = _load(folder).model.layers[2].mlp
    tensors = load_file(folder / "model.safetensors")
    path = f"model.layers.2.{block}"
    assert torch.equal(mlp.gate.weight, tensors[f"{path}.gate.weight"])
    for i in range(mlp.num_experts):
        gate, up, down = (tensors[f"{path}.experts.{i}.{name}.weight"] for name in names)
        assert torch.equal(mlp.gate_up[i], torch.cat((gate, up))) and torch.equal(mlp.down[i], down)

    _edit(folder, lambda tensors: tensors.pop(f"{path}.experts.3.{names[1]}.weight"))
    with pytest.raises(CheckpointError, match=rf"lacks 1 tensor .* needs: {path}\.experts\.3\.{names[1]}\.weight\.$"):
        _load(folder)
    _edit(folder, lambda tensors: tensors.update({f"{path}.experts.3.{names[1]}.weight": up[1:].clone()}))
    with pytest.raises(CheckpointError, match=rf"experts\.3\.{names[1]}\.weight has the shape .* calls for"):
        _load(folder)
    extra = {f"{path}.experts.3.{names[1]}.weight": up, f"{path}.experts.8.{names[1]}.weight": up.clone()}
    _edit(folder, lambda tensors: tensors.update(extra))
    with pytest.raises(CheckpointError, match=rf"holds 1 tensor that the model does not use: {path}\.experts\.8"):
        _load(folder)


def test_tensors_are_cast_to_the_dtype_of_the_model(tmp_path):
    folder = checkpoints.make_checkpoint(tmp_path, "llama", dtype=torch.float16)
    half = load_file(folder / "model.safetensors")["lm_head.weight"]
    assert half.dtype == torch.float16
    for dtype in (torch.float32, torch.bfloat16):
        assert torch.equal(_load(folder, dtype).lm_head.weight, half.to(dtype))


def test_redundant_tensors_may_be_present(folder):
    def change(tensors):
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)

    _edit(folder, change)
    _load(folder)


def test_missing_tensors_are_reported(folder):
    _edit(folder, lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.weight"))
    with pytest.raises(CheckpointError, match=r"lacks 1 tensor that the model needs: model\.layers\.1\.mlp\.up_proj"):
        _load(folder)

    def drop_norms(tensors):
        for name in [name for name in tensors if "norm" in name]:
            del tensors[name]

    _edit(folder, drop_norms)
    with pytest.raises(CheckpointError, match=r"lacks 14 tensors .* and 11 more\.$"):
        _load(folder)


def test_an_untied_model_needs_lm_head(tmp_path):
    folder = checkpoints.make_checkpoint(tmp_path, "llama")
    _edit(folder, lambda tensors: tensors.pop("lm_head.weight"))
    with pytest.raises(CheckpointError, match=r"lacks 1 tensor that the model needs: lm_head\.weight\."):
        _load(folder)


def test_unused_tensors_are_reported(folder):
    _edit(folder, lambda tensors: tensors.update({"model.layers.3.mlp.up_proj.weight": torch.ones(2)}))
    with pytest.raises(CheckpointError, match=r"holds 1 tensor that the model does not use: model\.layers\.3"):
        _load(folder)


def test_wrong_shapes_are_reported(folder):
    _edit(folder, lambda tensors: tensors.update({"model.layers.0.self_attn.k_proj.weight": torch.ones(16, 64)}))
    with pytest.raises(CheckpointError, match=r"k_proj\.weight has the shape \[16, 64\] .* calls for \[32, 64\]\."):
        _load(folder)
