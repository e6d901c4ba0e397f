"""Loading quantized checkpoints: whole, in shards, kept quantized, and malformed."""

from functools import partial
from pathlib import Path
from typing import Any

import checkpoints
import pytest
import quantized_checkpoints
import torch
from safetensors.torch import load_file, save_file

from pagewire.engine.checkpoint.spec import model_facts, read_spec
from pagewire.engine.models import registry
from pagewire.engine.parallel.collectives import Alone
from pagewire.engine.parallel.shard import Cut
from pagewire.engine.weights.loader import load_weights
from pagewire.engine.weights.mapping import checkpoint_targets
from pagewire.engine.weights.quantized import read_weight
from pagewire.engine.weights.reader import CheckpointReader
from pagewire.errors import CheckpointError, ConfigError
from pagewire.kernels.ops import reference_ops
from pagewire.kernels.quantized_weight import concatenate

KINDS = list(quantized_checkpoints.CONFIGS)
_ALONE = Alone()


class _Rank(Alone):
    """One of two ranks that never communicate."""

    size = 2

    def __init__(self, rank):
        self.rank = rank


def _load(folder, dtype=torch.float32, group=_ALONE, kept=None, **options):
    """The model's parameters. `kept` receives the weights that stay quantized."""
    spec, cpu = read_spec(folder), torch.device("cpu")
    model = registry.build_native(
        spec, max_len=8, dtype=dtype, weight_dtype=dtype, device=cpu, group=group, ops=reference_ops()
    )
    registry.allocate(model, cpu)
    parameters = dict(model.named_parameters())
    if kept is not None:  # parameters that stay quantized take no memory
        names = [name for name in parameters if "proj" in name or name.endswith((".gate_up", ".down"))]
        parameters |= {name: parameters[name].to("meta") for name in names}
        options["keep"] = {name: partial(_keep, kept, name) for name in names}
    with CheckpointReader(folder) as reader:
        targets = checkpoint_targets(parameters, model.fused, model.cuts, model.renamed)
        load_weights(reader, parameters, targets, scheme=spec.scheme, redundant=model.redundant, **options)
    return parameters


def _keep(kept, name, number, parts):
    matrices = kept.setdefault(name, {})
    assert number not in matrices, f"matrix {number} of {name} came twice"
    matrices[number] = concatenate(parts)


def _check_kept(kept, expected):
    """The matrices of each parameter have its values; those of a stack are complete."""
    for name, matrices in kept.items():
        values = expected[name].view(-1, *expected[name].shape[-2:])
        assert sorted(matrices) == list(range(len(values))), name
        for number, weight in matrices.items():
            assert torch.equal(weight.dequantize(torch.float32), values[number]), (name, number)
            assert weight.nbytes < values[number].nbytes / 3


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
    expected = _load(wide, dtype)
    for name, parameter in _load(narrow, dtype).items():
        assert torch.equal(parameter, expected[name]), name


@pytest.mark.parametrize("kind", KINDS)
def test_weights_that_stay_quantized_have_the_same_values(kind, made):
    narrow, wide = made(kind)
    kept = {}
    parameters = _load(narrow, kept=kept)
    expected = _load(wide)
    layer = "model.layers.0."
    projections = ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj")
    assert kept.keys() == {f"{layer}{name}.weight" for name in projections}
    _check_kept(kept, expected)
    for name in parameters.keys() - kept.keys():
        assert torch.equal(parameters[name], expected[name]), name


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_experts_that_stay_quantized_have_the_same_values(family, kind, tmp_path):
    """Whole, and cut by columns and by rows for two ranks."""
    sizes: dict[str, Any] = {"num_hidden_layers": 1, "head_dim": 32, "intermediate_size": 128}
    sizes |= {"moe_intermediate_size": 128, "mlp_only_layers": []} if family == "qwen3_moe" else {}
    source = checkpoints.make_checkpoint(tmp_path / "float", family, **sizes)
    narrow, wide = quantized_checkpoints.quantize_checkpoint(source, tmp_path, kind)
    for group in [_ALONE] if "ordered" in kind else [_ALONE, _Rank(0), _Rank(1)]:
        kept = {}
        _load(narrow, group=group, kept=kept)
        assert {"model.layers.0.mlp.gate_up", "model.layers.0.mlp.down"} < kept.keys()
        _check_kept(kept, _load(wide, group=group))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("cut", [Cut(0, 32, 64, 96), Cut(1, 32, 96, 96), Cut(0, 0, 96, 96)])
def test_a_rank_reads_its_shard(kind, cut, made):
    narrow, wide = made(kind)
    module = "model.layers.0.mlp.gate_proj" if cut.dim == 0 else "model.layers.0.mlp.down_proj"
    n, k = (96, 64) if cut.dim == 0 else (64, 96)
    whole = load_file(wide / "model.safetensors")[f"{module}.weight"]
    part = slice(cut.first, cut.last)
    with CheckpointReader(narrow) as reader:
        if "ordered" in kind and cut.dim == 1:
            with pytest.raises(ConfigError, match=r"down_proj .* another order \(desc_act\)"):
                read_weight(read_spec(narrow).scheme, reader, module, n, k, cut)
            return
        weight = read_weight(read_spec(narrow).scheme, reader, module, n, k, cut)
    assert torch.equal(weight.dequantize(torch.float32), whole[part] if cut.dim == 0 else whole[:, part])


@pytest.mark.parametrize("kind", [kind for kind in KINDS if "ordered" not in kind])
@pytest.mark.parametrize("rank", [0, 1])
def test_each_of_two_ranks_loads_its_shards(kind, rank, tmp_path, monkeypatch):
    monkeypatch.setattr(quantized_checkpoints, "BLOCK", 16)
    monkeypatch.setitem(quantized_checkpoints.CONFIGS["fp8-block"], "weight_block_size", [16, 16])
    source = checkpoints.make_checkpoint(tmp_path / "float", "llama", num_hidden_layers=1, intermediate_size=128)
    narrow, wide = quantized_checkpoints.quantize_checkpoint(source, tmp_path, kind)
    expected = _load(wide, group=_Rank(rank))
    for name, parameter in _load(narrow, group=_Rank(rank)).items():
        assert torch.equal(parameter, expected[name]), name
    kept = {}
    _load(narrow, group=_Rank(rank), kept=kept)
    _check_kept(kept, expected)


@pytest.mark.parametrize(
    ("kind", "cut", "complaint"),
    [
        ("fp8-block", Cut(0, 0, 48, 96), r"gate_proj is quantized 32 rows at a time, .* rows 0 to 48,"),
        ("fp8-block", Cut(1, 48, 96, 96), r"down_proj is quantized 32 columns at a time, .* columns 48 to 96,"),
        ("awq", Cut(0, 0, 12, 96), r"quantized 8 rows at a time"),
        ("awq", Cut(1, 0, 48, 96), r"quantized 32 columns at a time"),
        ("gptq", Cut(1, 48, 96, 96), r"quantized 32 columns at a time"),
    ],
)
def test_a_shard_must_not_cut_through_a_quantization_group(kind, cut, complaint, made):
    narrow, _ = made(kind)
    module = "model.layers.0.mlp.gate_proj" if cut.dim == 0 else "model.layers.0.mlp.down_proj"
    n, k = (96, 64) if cut.dim == 0 else (64, 96)
    with CheckpointReader(narrow) as reader, pytest.raises(ConfigError, match=complaint):
        read_weight(read_spec(narrow).scheme, reader, module, n, k, cut)


def test_the_last_block_may_be_smaller(tmp_path):
    source = checkpoints.make_checkpoint(tmp_path / "float", "llama", num_hidden_layers=1, intermediate_size=80)
    narrow, wide = quantized_checkpoints.quantize_checkpoint(source, tmp_path, "fp8-block")
    scheme, tensors = read_spec(narrow).scheme, load_file(wide / "model.safetensors")
    with CheckpointReader(narrow) as reader:
        up = read_weight(scheme, reader, "model.layers.0.mlp.up_proj", 80, 64, Cut(0, 64, 80, 80))
        down = read_weight(scheme, reader, "model.layers.0.mlp.down_proj", 64, 80, Cut(1, 32, 80, 80))
    assert torch.equal(up.dequantize(torch.float32), tensors["model.layers.0.mlp.up_proj.weight"][64:])
    assert torch.equal(down.dequantize(torch.float32), tensors["model.layers.0.mlp.down_proj.weight"][:, 32:])


def test_group_size_minus_1_makes_a_row_one_group(tmp_path, monkeypatch):
    monkeypatch.setattr(quantized_checkpoints, "GROUP", 64)
    source = checkpoints.make_checkpoint(tmp_path / "float", "llama", num_hidden_layers=1, intermediate_size=64)
    config = {**quantized_checkpoints.CONFIGS["gptq"], "group_size": -1}
    monkeypatch.setitem(quantized_checkpoints.CONFIGS, "gptq", config)
    narrow, wide = quantized_checkpoints.quantize_checkpoint(source, tmp_path, "gptq")
    expected = _load(wide)
    assert all(torch.equal(parameter, expected[name]) for name, parameter in _load(narrow).items())


def test_a_gptq_zero_point_stored_as_15_is_16(quantized):
    folder = quantized("gptq")
    name = "model.layers.0.self_attn.o_proj"

    def change(tensors):
        tensors[f"{name}.qzeros"].fill_(-1)
        tensors[f"{name}.qweight"].fill_(0)

    _edit(folder, change)
    scales = load_file(folder / "model.safetensors")[f"{name}.scales"].float().t().repeat_interleave(32, dim=1)
    assert torch.equal(_load(folder)[f"{name}.weight"], -16 * scales)


def test_a_module_without_a_scale_is_loaded_as_floats(quantized):
    """Regardless of the module lists in config.json."""
    folder = quantized("fp8-block")
    name = "model.layers.0.mlp.down_proj"
    weight = torch.randn(64, 96)

    def change(tensors):
        del tensors[f"{name}.weight_scale_inv"]
        tensors[f"{name}.weight"] = weight

    _edit(folder, change)
    assert torch.equal(_load(folder)[f"{name}.weight"], weight)


def test_8_bit_values_without_a_scale_are_refused(quantized):
    folder = quantized("fp8-channel")
    _edit(folder, lambda tensors: tensors.pop("model.layers.0.mlp.up_proj.weight_scale"))
    with pytest.raises(CheckpointError, match=r"up_proj\.weight has 8-bit values, but .* no scale for it"):
        _load(folder)


def test_a_scale_for_a_float_tensor_is_refused(quantized):
    folder = quantized("fp8-tensor")
    _edit(folder, lambda tensors: tensors.update({"model.layers.0.mlp.up_proj.weight": torch.ones(96, 64)}))
    with pytest.raises(CheckpointError, match=r"up_proj\.weight has a scale, but its type is float32"):
        _load(folder)


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
        _load(folder)


@pytest.mark.parametrize(("kind", "leaf"), [("awq", "qweight"), ("gptq", "qzeros"), ("packed-8", "weight_packed")])
def test_packed_numbers_of_another_type_are_reported(kind, leaf, quantized):
    folder = quantized(kind)
    name = f"model.layers.0.mlp.up_proj.{leaf}"
    _edit(folder, lambda tensors: tensors.update({name: tensors[name].long()}))
    with pytest.raises(CheckpointError, match=rf"up_proj\.{leaf} has the type int64 and not int32"):
        _load(folder)


def test_a_missing_tensor_is_reported(quantized):
    folder = quantized("gptq")
    _edit(folder, lambda tensors: tensors.pop("model.layers.0.mlp.up_proj.qzeros"))
    with pytest.raises(CheckpointError, match=r"lacks 1 tensor that the model needs: .*up_proj\.qzeros"):
        _load(folder)


def test_zero_biases_of_old_gptq_writers_are_ignored_and_others_refused(quantized):
    folder = quantized("gptq")
    name = "model.layers.0.self_attn.q_proj.bias"
    _edit(folder, lambda tensors: tensors.update({name: torch.zeros(64)}))
    _load(folder)
    _edit(folder, lambda tensors: tensors.update({name: torch.ones(64)}))
    with pytest.raises(CheckpointError, match=r"does not use: .*q_proj\.bias"):
        _load(folder)


def test_a_g_idx_with_uneven_groups_is_refused(quantized):
    folder = quantized("gptq-v2-ordered")
    _edit(folder, lambda tensors: tensors["model.layers.0.mlp.up_proj.g_idx"].fill_(0))
    with pytest.raises(CheckpointError, match=r"up_proj\.g_idx does not divide 64 columns into groups of 32"):
        _load(folder)


def test_a_fused_weight_must_not_be_partly_quantized(quantized):
    folder = quantized("fp8-tensor")

    def widen(tensors):
        del tensors["model.layers.0.self_attn.k_proj.weight_scale"]
        tensors["model.layers.0.self_attn.k_proj.weight"] = torch.ones(32, 64)

    _edit(folder, widen)
    assert _load(folder).keys()
    with pytest.raises(CheckpointError, match=r"Some parts of .*qkv_proj\.weight are quantized and some are not"):
        _load(folder, kept={})


def test_weight_bytes_of_a_4_bit_checkpoint(made):
    narrow, _ = made("awq")
    facts = model_facts(read_spec(narrow), narrow, "x")
    stored = sum(tensor.nbytes for tensor in load_file(narrow / "model.safetensors").values())
    assert facts.weight_bytes == stored and facts.wide_bytes == 4 * stored
