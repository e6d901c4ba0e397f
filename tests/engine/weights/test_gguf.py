"""The tensors of GGUF files: decoded types against the `gguf` package, names, orders of rows, cuts and damage."""

from pathlib import Path

import checkpoints
import gguf
import gguf_files
import numpy as np
import programs
import pytest
import torch
from safetensors.torch import load_file

from pagewire.engine.checkpoint.gguf import PLAIN, TYPES
from pagewire.engine.checkpoint.quantization import GgufScheme
from pagewire.engine.weights import loader
from pagewire.engine.weights.gguf import GgufReader, decode
from pagewire.engine.weights.open import open_checkpoint
from pagewire.engine.weights.quantized import read_weight
from pagewire.engine.weights.reader import CheckpointReader
from pagewire.errors import CheckpointError, ConfigError
from pagewire.kernels.quantized_weight import concatenate
from pagewire.kernels.superblock_weight import SuperblockWeight

QUANTIZED = [name for name, _, _ in TYPES.values() if name not in PLAIN]


@pytest.mark.parametrize("kind", QUANTIZED)
def test_every_byte_is_decoded_as_the_package_does(kind):
    """Any bits: all numbers, negative and subnormal scales. Equal but for the sign of zeros."""
    values, num_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    rows = np.random.default_rng(0).integers(0, 256, (24, 5 * num_bytes), dtype=np.uint8)
    with np.errstate(invalid="ignore"):
        expected = gguf.dequantize(rows, gguf.GGMLQuantizationType[kind])
    weight = decode(kind, torch.from_numpy(rows), 24)
    assert weight.shape == (24, 5 * values) and weight.group_size in (16, 32)
    if isinstance(weight, SuperblockWeight):
        assert int(weight.values().numbers.max()) == 2**weight.form.bits - 1
    else:
        assert weight.numbers.dtype == torch.uint8 and int(weight.numbers.max()) < 2**weight.bits
    ours = weight.dequantize(torch.float32).numpy()
    is_finite = np.isfinite(expected) & np.isfinite(ours)
    assert is_finite.mean() > 0.8 and (ours[is_finite] == expected[is_finite]).all()


@pytest.mark.parametrize("kind", QUANTIZED)
def test_plausible_weights_are_equal_bit_for_bit(kind):
    tensor = np.random.default_rng(1).normal(size=(64, 512)).astype(np.float32)
    data = gguf_files.encode(tensor, kind)
    expected = torch.from_numpy(gguf.dequantize(data, gguf.GGMLQuantizationType[kind]).reshape(64, 512))
    ours = decode(kind, torch.from_numpy(data), 64).dequantize(torch.float32)
    assert torch.equal(ours, expected) and 0.1 < float(ours.std()) < 2
    is_zero = expected == 0
    assert torch.equal(ours[~is_zero].view(torch.int32), expected[~is_zero].view(torch.int32))


def test_parts_of_one_type_can_be_fused():
    """The kept weights of qkv_proj are concatenated in this way."""
    parts = [decode("Q4_K", torch.from_numpy(gguf_files.random_blocks("Q4_K", (n, 512), n)), n) for n in (8, 4, 4)]
    whole = concatenate(parts).dequantize(torch.float32)
    assert torch.equal(whole, torch.cat([part.dequantize(torch.float32) for part in parts]))


def make(folder, kind="llama", **changes):
    if kind == "qwen3_moe":
        changes["mlp_only_layers"] = []
    return checkpoints.make_checkpoint(folder / "folder", kind, **changes)


@pytest.mark.parametrize("kind", ["llama-biased", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe"])
@pytest.mark.parametrize("dtype", ["F32", "BF16"])
def test_names_and_tensors_are_those_of_the_folder(kind, dtype, tmp_path):
    torch_dtype = torch.bfloat16 if dtype == "BF16" else torch.float32
    folder = make(tmp_path, kind, dtype=torch_dtype)
    path = gguf_files.write_gguf(folder, tmp_path / "model.gguf", dtype)
    with open_checkpoint(path) as ours, CheckpointReader(folder) as theirs:
        assert isinstance(ours, GgufReader)
        assert {*ours.names()} == {*theirs.names()}
        for name in theirs.names():
            assert name in ours and ours.shape(name) == theirs.shape(name)
            tensor = theirs.tensor(name)
            assert torch.equal(ours.tensor(name).to(tensor.dtype), tensor), name
            assert torch.equal(ours.tensor(name, slice(8, 16)).to(tensor.dtype), tensor[8:16]), name
            if tensor.dim() == 2 and tensor.shape[1] > 16:
                part = (slice(4, 20), slice(16, 32))
                assert torch.equal(ours.tensor(name, part).to(tensor.dtype), tensor[part]), name


@pytest.mark.parametrize("kind", ["Q8_0", "Q6_K"])
def test_rows_and_columns_of_quantized_weights(kind, tmp_path):
    """Rows of Llama's q lie in another order in the file, and ranks take rows of some heads."""
    folder = make(tmp_path, **{**gguf_files.QUANTIZED_SIZES, "intermediate_size": 512})
    path = gguf_files.write_gguf(folder, tmp_path / "model.gguf", kind, widened=tmp_path / "widened")
    tensors = load_file(tmp_path / "widened" / "model.safetensors")
    size = 32 if kind == "Q8_0" else 16
    with open_checkpoint(path) as reader:
        for module in ("model.layers.0.self_attn.q_proj", "model.layers.1.mlp.down_proj", "model.embed_tokens"):
            whole = tensors[f"{module}.weight"]
            n, k = whole.shape
            assert torch.equal(reader.tensor(f"{module}.weight"), whole)
            parts = [((0, n), (0, k)), ((n // 2, n), (0, k)), ((0, n), (size, 3 * size))]
            for rows, columns in (*parts, ((0, n), (k // 2, k))):  # k / 2: a whole superblock of down_proj
                weight = read_weight(GgufScheme((kind,)), reader, module, n, k, rows, columns)
                part = whole[slice(*rows), slice(*columns)]
                assert torch.equal(weight.dequantize(torch.float32), part), (module, rows, columns)
            with pytest.raises(ConfigError, match=rf"is quantized {size} columns at a time, which a rank's part, colu"):
                read_weight(GgufScheme((kind,)), reader, module, n, k, (0, n), (8, k))


@pytest.mark.parametrize("kind", ["F32", "Q4_K"])
@pytest.mark.parametrize("num_widened", [1 << 24, 5 * 256])
def test_weights_are_those_of_the_widened_folder(kind, num_widened, tmp_path, monkeypatch):
    monkeypatch.setattr(loader, "_NUM_WIDENED", num_widened)  # a few rows at a time
    sizes = {**gguf_files.QUANTIZED_SIZES, "moe_intermediate_size": 256, "num_experts": 4}
    folder = make(tmp_path, "qwen3_moe", **sizes)
    path = gguf_files.write_gguf(folder, tmp_path / "model.gguf", kind, widened=tmp_path / "widened")
    ours, theirs = programs.load(path).tensors, programs.load(tmp_path / "widened").tensors
    assert ours.keys() == theirs.keys()
    for key, tensor in ours.items():
        assert torch.equal(tensor, theirs[key]), key


def rewrite(path: Path, old: bytes, new: bytes) -> None:
    data = path.read_bytes()
    assert len(old) == len(new) and data.count(old) == 1
    path.write_bytes(data.replace(old, new))


@pytest.mark.parametrize("kind", ["F32", "Q8_0"])
def test_missing_left_over_and_misshapen_tensors(kind, tmp_path):
    folder = make(tmp_path)
    path = gguf_files.write_gguf(folder, tmp_path / "model.gguf", kind, more={"blk.0.extra.weight": np.ones(4, "f")})
    with pytest.raises(CheckpointError, match=r"holds 1 tensor that the model does not use: blk\.0\.extra\.weight\.$"):
        programs.load(path)
    path = gguf_files.write_gguf(folder, tmp_path / "model.gguf", kind)
    rewrite(path, b"blk.1.ffn_up.weight", b"blk.9.ffn_up.weight")
    with pytest.raises(CheckpointError, match=r"lacks 1 tensor .* needs: model\.layers\.1\.mlp\.up_proj\.weight\.$"):
        programs.load(path)
    path = gguf_files.write_gguf(folder, tmp_path / "m.gguf", kind, metadata={"llama.feed_forward_length": 64})
    with pytest.raises(CheckpointError, match=r"mlp\.\w+_proj\.weight has the shape \[.*\] in the checkpoint"):
        programs.load(path)


def test_scales_that_are_not_finite(tmp_path):
    folder = make(tmp_path)
    path = gguf_files.write_gguf(folder, tmp_path / "model.gguf", "Q8_0")
    with open_checkpoint(path) as reader:
        place = reader._sources["model.layers.0.mlp.up_proj.weight"].tensor.offset
    data = bytearray(path.read_bytes())
    data[place : place + 2] = np.float16("nan").tobytes()
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match=r"layers\.0\.mlp\.up_proj\.weight has scales that are not finite"):
        programs.load(path)


def test_a_file_that_is_cut_short_while_it_is_open(tmp_path):
    path = gguf_files.write_gguf(make(tmp_path), tmp_path / "model.gguf")
    with open_checkpoint(path) as reader:
        with path.open("r+b") as file:
            file.truncate(path.stat().st_size // 2)
        with pytest.raises(CheckpointError, match=r"model\.gguf was cut short while it was read"):
            for name in reader.names():
                reader.tensor(name)


def test_heads_that_do_not_fit_the_rows(tmp_path):
    path = gguf_files.write_gguf(make(tmp_path), tmp_path / "m.gguf", metadata={"llama.attention.head_count": 48})
    with (
        open_checkpoint(path) as reader,
        pytest.raises(CheckpointError, match="has 64 rows, which are not 48 heads of"),
    ):
        reader.tensor("model.layers.0.self_attn.q_proj.weight")
