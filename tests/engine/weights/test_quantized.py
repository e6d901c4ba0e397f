"""Loading quantized checkpoints: whole, in shards, kept quantized, and malformed."""

import json
from pathlib import Path
from typing import Any

import checkpoints
import pytest
import quantized_checkpoints
import torch
from family_kinds import make_kind
from programs import load
from safetensors.torch import load_file, save_file

from pagewire.engine.checkpoint.spec import model_facts, read_spec
from pagewire.engine.weights.quantized import read_weight
from pagewire.engine.weights.reader import CheckpointReader
from pagewire.errors import CheckpointError, ConfigError

KINDS = list(quantized_checkpoints.CONFIGS)


def _check_kept(kept, expected):
    """The matrices that stay quantized have these values; those of a stack are complete."""
    for key, matrices in kept.items():
        values = expected[key].view(-1, *expected[key].shape[-2:])
        assert sorted(matrices) == list(range(len(values))), key
        for number, weight in matrices.items():
            assert torch.equal(weight.dequantize(torch.float32), values[number]), (key, number)
            assert weight.nbytes < values[number].nbytes / 2


def _edit(folder, change):
    file = folder / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """kind → (quantized, widened), made once."""
    folders: dict[str, tuple[Path, Path]] = {}

    def make(kind):
        if kind not in folders:
            folder = tmp_path_factory.mktemp(kind)
            source = checkpoints.make_checkpoint(folder / "float", "llama", num_hidden_layers=1)
            folders[kind] = quantized_checkpoints.quantize_checkpoint(source, folder, kind)
        return folders[kind]

    return make


@pytest.fixture
def quantized(tmp_path):
    """kind → a quantized checkpoint that may be changed."""

    def make(kind):
        source = checkpoints.make_checkpoint(tmp_path / "float", "llama", num_hidden_layers=1)
        return quantized_checkpoints.quantize_checkpoint(source, tmp_path, kind)[0]

    return make


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_are_dequantized_exactly(kind, dtype, made):
    narrow, wide = made(kind)
    expected = load(wide, dtype).tensors
    for key, tensor in load(narrow, dtype).tensors.items():
        assert torch.equal(tensor, expected[key]), key


@pytest.mark.parametrize("kind", KINDS)
def test_weights_that_stay_quantized_have_the_same_values(kind, made):
    narrow, wide = made(kind)
    loaded, expected = load(narrow, keeps=True), load(wide).tensors
    assert loaded.kept.keys() == {"0.0.qkv", "0.0.o", "0.1.gate_up", "0.1.down"}
    _check_kept(loaded.kept, expected)
    for key, tensor in loaded.tensors.items():
        assert torch.equal(tensor, expected[key]), key


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_experts_that_stay_quantized_have_the_same_values(family, kind, tmp_path):
    """Whole, and cut by columns and by rows for two ranks."""
    sizes: dict[str, Any] = {"num_hidden_layers": 1, "head_dim": 32, "intermediate_size": 128}
    sizes |= {"moe_intermediate_size": 128, "mlp_only_layers": []} if family == "qwen3_moe" else {}
    source = checkpoints.make_checkpoint(tmp_path / "float", family, **sizes)
    narrow, wide = quantized_checkpoints.quantize_checkpoint(source, tmp_path, kind)
    for rank, size in [(0, 1)] if "ordered" in kind else [(0, 1), (0, 2), (1, 2)]:
        loaded = load(narrow, rank=rank, size=size, keeps=True)
        assert {"0.1.experts.gate_up", "0.1.experts.down"} < loaded.kept.keys()
        _check_kept(loaded.kept, load(wide, rank=rank, size=size).tensors)


@pytest.mark.parametrize(
    ("family", "kind"),
    [
        *((family, "awq") for family in ("bamba", "jamba", "lfm2", "mamba2", "minimax", "qwen3_5")),
        *((family, "fp8-block") for family in ("bamba", "jamba", "minimax")),
        ("bamba", "gptq"), ("jamba", "int8"), ("mamba2", "packed-zeros"),
    ],
)  # fmt: skip
def test_recurrent_layers_that_stay_quantized_have_the_same_values(family, kind, tmp_path, monkeypatch):
    """Whole, and of two ranks, whose rows lie apart in a product that several inputs of a mixer share."""
    monkeypatch.setattr(quantized_checkpoints, "BLOCK", 16)
    monkeypatch.setitem(quantized_checkpoints.CONFIGS["fp8-block"], "weight_block_size", [16, 16])
    source = checkpoints.make_checkpoint(tmp_path / "float", family, intermediate_size=128)
    narrow, wide = quantized_checkpoints.quantize_checkpoint(source, tmp_path, kind)
    for rank, size in [(0, 1), (0, 2), (1, 2)]:
        loaded, expected = load(narrow, rank=rank, size=size, keeps=True), load(wide, rank=rank, size=size).tensors
        of_mixer = {"0.0.bcx", "0.0.xz", "0.0.zxbcdt", "0.0.qkv", "0.0.qkv_gate", "0.0.out", "0.0.o"}
        assert of_mixer & loaded.kept.keys()
        _check_kept(loaded.kept, expected)
        for key, tensor in loaded.tensors.items():
            assert torch.equal(tensor, expected[key]), key


GATE, DOWN = ("model.layers.0.mlp.gate_proj", 96, 64), ("model.layers.0.mlp.down_proj", 64, 96)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("matrix", "rows", "columns"),
    [(GATE, (32, 64), (0, 64)), (DOWN, (0, 64), (32, 96)), (GATE, (0, 96), (0, 64)), (DOWN, (32, 64), (32, 64))],
)
def test_some_rows_and_columns_are_read(kind, matrix, rows, columns, made):
    narrow, wide = made(kind)
    module, n, k = matrix
    whole = load_file(wide / "model.safetensors")[f"{module}.weight"]
    scheme = read_spec(narrow).scheme
    with CheckpointReader(narrow) as reader:
        if "ordered" in kind and columns != (0, k):
            with pytest.raises(ConfigError, match=r"down_proj .* another order \(desc_act\)"):
                read_weight(scheme, reader, module, n, k, rows, columns)
            return
        weight = read_weight(scheme, reader, module, n, k, rows, columns)
    assert torch.equal(weight.dequantize(torch.float32), whole[slice(*rows), slice(*columns)])


@pytest.mark.parametrize("kind", [kind for kind in KINDS if "ordered" not in kind])
@pytest.mark.parametrize("rank", [0, 1])
def test_each_of_two_ranks_loads_its_part(kind, rank, tmp_path, monkeypatch):
    monkeypatch.setattr(quantized_checkpoints, "BLOCK", 16)
    monkeypatch.setitem(quantized_checkpoints.CONFIGS["fp8-block"], "weight_block_size", [16, 16])
    source = checkpoints.make_checkpoint(tmp_path / "float", "llama", num_hidden_layers=1, intermediate_size=128)
    narrow, wide = quantized_checkpoints.quantize_checkpoint(source, tmp_path, kind)
    expected = load(wide, rank=rank, size=2).tensors
    for key, tensor in load(narrow, rank=rank, size=2).tensors.items():
        assert torch.equal(tensor, expected[key]), key
    _check_kept(load(narrow, rank=rank, size=2, keeps=True).kept, expected)


@pytest.mark.parametrize(
    ("kind", "matrix", "rows", "columns", "complaint"),
    [
        ("fp8-block", GATE, (0, 48), (0, 64), r"gate_proj is quantized 32 rows at a time, .* rows 0 to 48,"),
        ("fp8-block", DOWN, (0, 64), (48, 96), r"down_proj is quantized 32 columns at a time, .* columns 48 to 96,"),
        ("awq", GATE, (0, 12), (0, 64), r"quantized 8 rows at a time"),
        ("awq", DOWN, (0, 64), (0, 48), r"quantized 32 columns at a time"),
        ("gptq", DOWN, (0, 64), (48, 96), r"quantized 32 columns at a time"),
    ],
)
def test_a_part_must_not_cut_through_a_quantization_group(kind, matrix, rows, columns, complaint, made):
    narrow, _ = made(kind)
    with CheckpointReader(narrow) as reader, pytest.raises(ConfigError, match=complaint):
        read_weight(read_spec(narrow).scheme, reader, *matrix, rows, columns)


def test_the_last_block_may_be_smaller(tmp_path):
    source = checkpoints.make_checkpoint(tmp_path / "float", "llama", num_hidden_layers=1, intermediate_size=80)
    narrow, wide = quantized_checkpoints.quantize_checkpoint(source, tmp_path, "fp8-block")
    scheme, tensors = read_spec(narrow).scheme, load_file(wide / "model.safetensors")
    with CheckpointReader(narrow) as reader:
        up = read_weight(scheme, reader, "model.layers.0.mlp.up_proj", 80, 64, (64, 80), (0, 64))
        down = read_weight(scheme, reader, "model.layers.0.mlp.down_proj", 64, 80, (0, 64), (32, 80))
    assert torch.equal(up.dequantize(torch.float32), tensors["model.layers.0.mlp.up_proj.weight"][64:])
    assert torch.equal(down.dequantize(torch.float32), tensors["model.layers.0.mlp.down_proj.weight"][:, 32:])


def test_group_size_minus_1_makes_a_row_one_group(tmp_path, monkeypatch):
    monkeypatch.setattr(quantized_checkpoints, "GROUP", 64)
    source = checkpoints.make_checkpoint(tmp_path / "float", "llama", num_hidden_layers=1, intermediate_size=64)
    config = {**quantized_checkpoints.CONFIGS["gptq"], "group_size": -1}
    monkeypatch.setitem(quantized_checkpoints.CONFIGS, "gptq", config)
    narrow, wide = quantized_checkpoints.quantize_checkpoint(source, tmp_path, "gptq")
    expected = load(wide).tensors
    assert all(torch.equal(tensor, expected[key]) for key, tensor in load(narrow).tensors.items())


def test_a_gptq_zero_point_stored_as_15_is_16(quantized):
    folder = quantized("gptq")
    name = "model.layers.0.self_attn.o_proj"

    def change(tensors):
        tensors[f"{name}.qzeros"].fill_(-1)
        tensors[f"{name}.qweight"].fill_(0)

    _edit(folder, change)
    scales = load_file(folder / "model.safetensors")[f"{name}.scales"].float().t().repeat_interleave(32, dim=1)
    assert torch.equal(load(folder).tensors["0.0.o"], -16 * scales)


def test_a_module_without_a_scale_is_loaded_as_floats(quantized):
    """Regardless of the module lists in config.json."""
    folder = quantized("fp8-block")
    name = "model.layers.0.mlp.down_proj"
    weight = torch.randn(64, 96)

    def change(tensors):
        del tensors[f"{name}.weight_scale_inv"]
        tensors[f"{name}.weight"] = weight

    _edit(folder, change)
    assert torch.equal(load(folder).tensors["0.1.down"], weight)


def test_8_bit_values_without_a_scale_are_refused(quantized):
    folder = quantized("fp8-channel")
    _edit(folder, lambda tensors: tensors.pop("model.layers.0.mlp.up_proj.weight_scale"))
    with pytest.raises(CheckpointError, match=r"up_proj\.weight has 8-bit values, but .* no scale for it"):
        load(folder)


def test_a_quantized_matrix_whose_columns_come_first_is_refused(tmp_path):
    """GPT-2's. That of a square matrix has the shape that is expected, and would be taken for its transpose."""
    folder = make_kind(tmp_path, "GPT2Config", {})
    file, name = folder / "config.json", "transformer.h.0.attn.c_proj"
    file.write_text(json.dumps({**json.loads(file.read_text()), "quantization_config": {"quant_method": "fp8"}}))

    def change(tensors):
        tensors[f"{name}.weight"] = tensors[f"{name}.weight"].to(torch.float8_e4m3fn)
        tensors[f"{name}.weight_scale"] = torch.ones(())

    _edit(folder, change)
    with pytest.raises(CheckpointError, match=f"{name} is quantized, .* whose columns come first, only unquantized"):
        load(folder)


def test_a_scale_for_a_float_tensor_is_refused(quantized):
    folder = quantized("fp8-tensor")
    _edit(folder, lambda tensors: tensors.update({"model.layers.0.mlp.up_proj.weight": torch.ones(96, 64)}))
    with pytest.raises(CheckpointError, match=r"up_proj\.weight has a scale, but its type is float32"):
        load(folder)


@pytest.mark.parametrize(
    ("kind", "leaf", "shape"),
    [
        ("fp8-block", "weight_scale_inv", r"\[3, 2\] or \[\] or"),
        ("awq", "qweight", r"\[64, 12\]"),
        ("gptq", "qzeros", r"\[2, 12\]"),
        ("gptq", "g_idx", r"\[64\]"),
    ],
)
def test_wrong_shapes_are_reported(kind, leaf, shape, quantized):
    folder = quantized(kind)
    name = f"model.layers.0.mlp.up_proj.{leaf}"
    _edit(folder, lambda tensors: tensors.update({name: tensors[name][:1].repeat(7, *[1] * (tensors[name].dim() - 1))}))
    with pytest.raises(CheckpointError, match=rf"up_proj\.{leaf} has the shape .* calls for {shape}"):
        load(folder)


@pytest.mark.parametrize(("kind", "leaf"), [("awq", "qweight"), ("gptq", "qzeros"), ("packed-8", "weight_packed")])
def test_packed_numbers_of_another_type_are_reported(kind, leaf, quantized):
    folder = quantized(kind)
    name = f"model.layers.0.mlp.up_proj.{leaf}"
    _edit(folder, lambda tensors: tensors.update({name: tensors[name].long()}))
    with pytest.raises(CheckpointError, match=rf"up_proj\.{leaf} has the type int64 and not int32"):
        load(folder)


def test_a_missing_tensor_is_reported(quantized):
    folder = quantized("gptq")
    _edit(folder, lambda tensors: tensors.pop("model.layers.0.mlp.up_proj.qzeros"))
    with pytest.raises(CheckpointError, match=r"lacks 1 tensor that the model needs: .*up_proj\.qzeros"):
        load(folder)


def test_zero_biases_of_old_gptq_writers_are_ignored_and_others_refused(quantized):
    folder = quantized("gptq")
    name = "model.layers.0.self_attn.q_proj.bias"
    _edit(folder, lambda tensors: tensors.update({name: torch.zeros(64)}))
    load(folder)
    _edit(folder, lambda tensors: tensors.update({name: torch.ones(64)}))
    with pytest.raises(CheckpointError, match=r"does not use: .*q_proj\.bias"):
        load(folder)


def test_a_g_idx_with_uneven_groups_is_refused(quantized):
    folder = quantized("gptq-v2-ordered")
    _edit(folder, lambda tensors: tensors["model.layers.0.mlp.up_proj.g_idx"].fill_(0))
    with pytest.raises(CheckpointError, match=r"up_proj\.g_idx does not divide 64 columns into groups of 32"):
        load(folder)


def test_a_matrix_of_which_a_part_is_not_quantized_is_widened(quantized):
    folder = quantized("fp8-tensor")
    values = torch.randn(32, 64)

    def widen(tensors):
        del tensors["model.layers.0.self_attn.k_proj.weight_scale"]
        tensors["model.layers.0.self_attn.k_proj.weight"] = values

    _edit(folder, widen)
    loaded = load(folder, keeps=True)
    assert loaded.kept.keys() == {"0.0.o", "0.1.gate_up", "0.1.down"}
    assert torch.equal(loaded.tensors["0.0.qkv"], load(folder).tensors["0.0.qkv"])
    assert torch.equal(loaded.tensors["0.0.qkv"][64:96], values)


def test_weight_bytes_of_a_4_bit_checkpoint(made):
    narrow, _ = made("awq")
    facts = model_facts(read_spec(narrow), narrow, "x")
    stored = sum(tensor.nbytes for tensor in load_file(narrow / "model.safetensors").values())
    assert facts.weight_bytes == stored and facts.wide_bytes == 4 * stored
