"""Loading checkpoints, good ones and ones with each kind of error."""

from pathlib import Path

import checkpoints
import programs
import pytest
import torch
from safetensors.torch import load_file, save_file

from pagewire.errors import CheckpointError


def _edit(folder: Path, change) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


@pytest.fixture
def folder(tmp_path):
    return checkpoints.make_checkpoint(tmp_path, "qwen3")


def test_every_matrix_and_vector_is_filled(folder):
    loaded = programs.load(folder).tensors
    tensors = load_file(folder / "model.safetensors")
    parts = [tensors[f"model.layers.1.self_attn.{x}_proj.weight"] for x in "qkv"]
    assert torch.equal(loaded["1.0.qkv"], torch.cat(parts))
    gate_up = [tensors[f"model.layers.2.mlp.{x}_proj.weight"] for x in ("gate", "up")]
    assert torch.equal(loaded["2.1.gate_up"], torch.cat(gate_up))
    assert torch.equal(loaded["0.0.k_norm"], tensors["model.layers.0.self_attn.k_norm.weight"])
    assert "head" not in loaded, "it is the embedding"
    assert sum(tensor.numel() for tensor in loaded.values()) == sum(tensor.numel() for tensor in tensors.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [1, 2])
def test_matrices_of_one_tensor_are_taken_where_the_file_is_mapped(folder, size, dtype):
    """The same values as those that are copied; matrices of several tensors are copied."""
    copied = programs.load(folder, dtype, rank=size - 1, size=size)
    taken = programs.load(folder, dtype, rank=size - 1, size=size, takes=True)
    assert not copied.taken and {"embedding", "1.0.o", "1.1.down"} <= taken.taken
    assert not {"1.0.qkv", "1.1.gate_up"} & taken.taken
    assert copied.tensors.keys() == taken.tensors.keys()
    for key, values in copied.tensors.items():
        assert values.dtype == taken.tensors[key].dtype and torch.equal(values, taken.tensors[key]), key


def test_progress_counts_every_number(folder):
    reports = []
    loaded = programs.load(folder, progress=lambda *report: reports.append(report)).tensors
    total = sum(tensor.numel() for tensor in loaded.values())
    assert {end for _, end in reports} == {total} and reports[-1] == (total, total)
    assert [done for done, _ in reports] == sorted({done for done, _ in reports})


@pytest.mark.parametrize(
    ("kind", "block", "names"),
    [
        ("qwen3_moe", "mlp", ("gate_proj", "up_proj", "down_proj")),
        ("mixtral", "block_sparse_moe", ("w1", "w3", "w2")),
    ],
)
def test_experts_are_stacked_and_checked(kind, block, names, tmp_path):
    folder = checkpoints.make_checkpoint(tmp_path, kind)
    loaded = programs.load(folder).tensors
    tensors = load_file(folder / "model.safetensors")
    path = f"model.layers.2.{block}"
    assert torch.equal(loaded["2.1.router"], tensors[f"{path}.gate.weight"])
    assert len(loaded["2.1.experts.gate_up"]) == (8 if kind == "qwen3_moe" else 4)
    for i, (gate_up, down) in enumerate(zip(loaded["2.1.experts.gate_up"], loaded["2.1.experts.down"], strict=True)):
        gate, up, other = (tensors[f"{path}.experts.{i}.{name}.weight"] for name in names)
        assert torch.equal(gate_up, torch.cat((gate, up))) and torch.equal(down, other)

    up = tensors[f"{path}.experts.3.{names[1]}.weight"]
    _edit(folder, lambda tensors: tensors.pop(f"{path}.experts.3.{names[1]}.weight"))
    with pytest.raises(CheckpointError, match=rf"lacks 1 tensor .* needs: {path}\.experts\.3\.{names[1]}\.weight\.$"):
        programs.load(folder)
    _edit(folder, lambda tensors: tensors.update({f"{path}.experts.3.{names[1]}.weight": up[1:].clone()}))
    with pytest.raises(CheckpointError, match=rf"experts\.3\.{names[1]}\.weight has the shape .* calls for"):
        programs.load(folder)
    extra = {f"{path}.experts.3.{names[1]}.weight": up, f"{path}.experts.8.{names[1]}.weight": up.clone()}
    _edit(folder, lambda tensors: tensors.update(extra))
    with pytest.raises(CheckpointError, match=rf"holds 1 tensor that the model does not use: {path}\.experts\.8"):
        programs.load(folder)


def test_tensors_are_cast_to_the_dtype_of_the_model(tmp_path):
    folder = checkpoints.make_checkpoint(tmp_path, "llama", dtype=torch.float16)
    half = load_file(folder / "model.safetensors")["lm_head.weight"]
    assert half.dtype == torch.float16
    for dtype in (torch.float32, torch.bfloat16):
        assert torch.equal(programs.load(folder, dtype).tensors["head"], half.to(dtype))


def test_redundant_tensors_may_be_present(folder):
    def change(tensors):
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)

    _edit(folder, change)
    programs.load(folder)


def test_missing_tensors_are_reported(folder):
    _edit(folder, lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.weight"))
    with pytest.raises(CheckpointError, match=r"lacks 1 tensor that the model needs: model\.layers\.1\.mlp\.up_proj"):
        programs.load(folder)

    def drop_norms(tensors):
        for name in [name for name in tensors if "norm" in name]:
            del tensors[name]

    _edit(folder, drop_norms)
    with pytest.raises(CheckpointError, match=r"lacks 14 tensors .* and 11 more\.$"):
        programs.load(folder)


def test_an_untied_model_needs_lm_head(tmp_path):
    folder = checkpoints.make_checkpoint(tmp_path, "llama")
    _edit(folder, lambda tensors: tensors.pop("lm_head.weight"))
    with pytest.raises(CheckpointError, match=r"lacks 1 tensor that the model needs: lm_head\.weight\."):
        programs.load(folder)


def test_unused_tensors_are_reported(folder):
    _edit(folder, lambda tensors: tensors.update({"model.layers.3.mlp.up_proj.weight": torch.ones(2)}))
    with pytest.raises(CheckpointError, match=r"holds 1 tensor that the model does not use: model\.layers\.3"):
        programs.load(folder)


def test_wrong_shapes_are_reported(folder):
    _edit(folder, lambda tensors: tensors.update({"model.layers.0.self_attn.k_proj.weight": torch.ones(16, 64)}))
    with pytest.raises(CheckpointError, match=r"k_proj\.weight has the shape \[16, 64\] .* calls for \[32, 64\]\."):
        programs.load(folder)
