"""A GGUF file's metadata gives the spec that the checkpoint's config.json gives."""

import os
from dataclasses import replace
from pathlib import Path

import checkpoints
import gguf
import gguf_files
import numpy as np
import pytest
import torch
from msgspec import structs

from pagewire.config.config import SamplingDefaults
from pagewire.engine.checkpoint.spec import fingerprint, model_facts, read_spec
from pagewire.engine.executors.rotary import inverse_frequencies
from pagewire.engine.models.description import Attention, Block, Decoder, Reach, Rope
from pagewire.errors import CheckpointError, ConfigError, PagewireError

KINDS = ["llama", "llama-biased", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe"]


def make(folder: Path, kind: str = "llama", **changes: object) -> Path:
    if kind == "qwen3_moe":
        changes["mlp_only_layers"] = []
    return checkpoints.make_checkpoint(folder / "folder", kind, **changes)


def ropes(decoder: Decoder | None) -> list[Rope | None]:
    """Of every layer."""
    assert decoder is not None
    bodies = [branch.body for block in decoder.blocks for sub in block.sublayers for branch in sub.branches]
    return [body.rope for body in bodies if isinstance(body, Attention)]


def reaches(decoder: Decoder | None) -> list[Reach]:
    """Of every layer."""
    assert decoder is not None
    bodies = [branch.body for block in decoder.blocks for sub in block.sublayers for branch in sub.branches]
    return [body.reach for body in bodies if isinstance(body, Attention)]


def with_rope(decoder: Decoder, rope: Rope) -> Decoder:
    """The same decoder, with this rope in every layer."""

    def changed(block: Block) -> Block:
        attention, feed_forward = block.sublayers
        (branch,) = attention.branches
        assert isinstance(branch.body, Attention)
        branches = (replace(branch, body=replace(branch.body, rope=rope)),)
        return replace(block, sublayers=(replace(attention, branches=branches), feed_forward))

    return replace(decoder, blocks=tuple(map(changed, decoder.blocks)))


@pytest.mark.parametrize("kind", KINDS)
def test_the_spec_is_that_of_the_folder(kind: str, tmp_path: Path) -> None:
    folder = make(tmp_path, kind)
    ours, theirs = read_spec(gguf_files.write_gguf(folder, tmp_path / "model.gguf")), read_spec(folder)
    if kind == "llama":  # whose scaled frequencies are numbers in the file
        own, other = ropes(ours.decoder)[0], ropes(theirs.decoder)[0]
        assert own is not None and other is not None and ours.decoder is not None
        assert torch.allclose(inverse_frequencies(own), inverse_frequencies(other), rtol=1e-6, atol=0)
        decoder = with_rope(ours.decoder, other)
        ours = structs.replace(ours, rope_kind=theirs.rope_kind, original_max_position=256, decoder=decoder)
    assert structs.asdict(ours) == structs.asdict(theirs)


@pytest.mark.parametrize("rope", [{"rope_type": "linear", "factor": 2.5}, {"rope_type": "yarn", "factor": 4.0}])
def test_scaled_positions(rope: dict[str, object], tmp_path: Path) -> None:
    rope = {**rope, "rope_theta": 1e6}
    if rope["rope_type"] == "yarn":
        rope["original_max_position_embeddings"] = 256
    folder = make(tmp_path, "qwen2", rope_parameters=rope)
    (ours, *_) = ropes(read_spec(gguf_files.write_gguf(folder, tmp_path / "model.gguf")).decoder)
    (theirs, *_) = ropes(read_spec(folder).decoder)
    assert ours is not None and theirs is not None
    assert ours.cos_scale == pytest.approx(theirs.cos_scale)
    assert torch.equal(inverse_frequencies(ours), inverse_frequencies(theirs))


@pytest.mark.parametrize(
    ("kind", "expected"), [("F32", "float32"), ("F16", "float16"), ("BF16", "bfloat16"), ("Q8_0", "float16")]
)
def test_types(kind: str, expected: str, tmp_path: Path) -> None:
    folder = make(tmp_path, "qwen3")
    path = gguf_files.write_gguf(folder, tmp_path / "model.gguf", kind)
    spec = read_spec(path)
    assert spec.dtype == expected
    if kind == "Q8_0":
        assert spec.scheme is not None and spec.scheme.note == "a GGUF file (Q8_0)"
    else:
        assert spec.scheme is None
    facts = model_facts(spec, path, "x")
    num = facts.wide_bytes // (4 if expected == "float32" else 2)
    assert num == sum(tensor.numel() for tensor in checkpoints.load_reference(folder).parameters())
    assert (facts.path, facts.checkpoint_dtype, facts.is_native) == (str(path), expected, True)


def test_the_fingerprint_is_that_of_all_parts(tmp_path: Path) -> None:
    folder = make(tmp_path)
    whole = gguf_files.write_gguf(folder, tmp_path / "model.gguf")
    first = gguf_files.write_gguf(folder, tmp_path / "model.gguf", split=20)
    second = first.with_name("model-00002-of-00002.gguf")
    seen = [fingerprint(whole), fingerprint(first)]
    assert fingerprint(first) == seen[1] and len(bytes.fromhex(seen[1])) == 32
    stat = second.stat()
    os.utime(second, ns=(stat.st_atime_ns, stat.st_mtime_ns + 1))
    seen.append(fingerprint(first))
    assert len({*seen}) == 3


def test_recommended_sampling(tmp_path: Path) -> None:
    sampling = {"temp": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.05, "penalty_repeat": 1.1}
    metadata = {f"general.sampling.{name}": value for name, value in sampling.items()}
    path = gguf_files.write_gguf(make(tmp_path), tmp_path / "model.gguf", metadata=metadata)
    assert read_spec(path).sampling == SamplingDefaults(
        temperature=0.6, top_k=20, top_p=0.95, min_p=0.05, repetition_penalty=1.1
    )


def test_every_end_of_an_output(tmp_path: Path) -> None:
    """Files name one end; instruction-tuned models have more, which are control tokens of known names."""
    folder = make(tmp_path)
    tokens = [f"t{i}" for i in range(320)]
    for id, token in ((300, "<|eot_id|>"), (301, "<|im_end|>"), (302, "<|end_of_text|>")):
        tokens[id] = token
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    gguf_files.add_config(writer, folder)
    writer.add_token_list(tokens)
    writer.add_token_types([3 if id in (300, 301) else 1 for id in range(320)])
    writer.add_eos_token_id(2)
    writer.add_eot_token_id(300)
    writer.add_eom_token_id(9999)
    writer.add_tensor("token_embd.weight", np.zeros((320, 64), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert read_spec(path).eos_token_ids == (2, 300, 301), "302 is an ordinary token, and 9999 is none"


@pytest.mark.parametrize(
    ("metadata", "complaint"),
    [
        ({"general.architecture": "mamba"}, "has the architecture mamba; of GGUF files pagewire serves llama, qwen2, "),
        ({"llama.block_count": 0}, "has no llama.block_count"),
        ({"llama.block_count": -1}, "llama.block_count = -1, which should be a positive"),
        ({"llama.block_count": 2000}, "num_hidden_layers = 2000; the limit is 1024"),
        ({"llama.embedding_length": "64"}, "llama.embedding_length = '64', which should be a whole number"),
        ({"llama.attention.head_count": 3}, "3 attention heads, no multiple of its 2"),
        ({"llama.attention.key_length": -16}, "key_length = -16, which should be a positive"),
        ({"llama.attention.value_length": 32}, "value_length = 32, but its heads have 16 numbers"),
        ({"llama.rope.dimension_count": 8}, "rope.dimension_count = 8, but its heads have 16 numbers"),
        ({"llama.rope.freq_base": -1.0}, "rope_theta = -1.0, which should be a positive number"),
        ({"llama.rope.scaling.type": "longrope"}, "has longrope position embeddings, which pagewire does not compute"),
        ({"llama.pooling_type": 3}, "has llama.pooling_type = 3, which pagewire does not compute"),
        ({"llama.attention.scale": 0.5}, "has llama.attention.scale = 0.5; pagewire computes 1 / √16"),
        ({"llama.expert_count": 4}, "has no llama.expert_used_count"),
    ],
)
def test_metadata_that_cannot_be_served(metadata: dict[str, int | float | str], complaint: str, tmp_path: Path) -> None:
    path = gguf_files.write_gguf(make(tmp_path), tmp_path / "model.gguf", metadata=metadata)
    with pytest.raises(ConfigError) as raised:
        read_spec(path)
    assert str(path) in str(raised.value) and complaint in str(raised.value)


def test_a_window_of_some_layers_is_refused(tmp_path: Path) -> None:
    folder = make(tmp_path, "qwen2")
    path = gguf_files.write_gguf(folder, tmp_path / "m.gguf", metadata={"qwen2.attention.sliding_window": 24})
    with pytest.raises(
        ConfigError, match=r"sliding_window = 24, but a GGUF file of qwen2 does not say in which layers"
    ):
        read_spec(path)
    path = gguf_files.write_gguf(folder, tmp_path / "m.gguf", metadata={"qwen2.attention.sliding_window": 4096})
    assert reaches(read_spec(path).decoder) == [Reach()] * 3, "as long as the context"


@pytest.mark.parametrize("divisors", [[1.0] * 7, [1.0] * 7 + [0.0], [1.0] * 7 + [float("nan")]])
def test_damaged_frequencies(divisors: list[float], tmp_path: Path) -> None:
    folder = make(tmp_path, rope_parameters={"rope_type": "default", "rope_theta": 1e4})
    path = gguf_files.write_gguf(
        folder, tmp_path / "m.gguf", more={"rope_freqs.weight": np.array(divisors, np.float32)}
    )
    with pytest.raises(CheckpointError, match=r"a rope_freqs\.weight that is not 8 positive numbers"):
        read_spec(path)


def test_a_file_without_an_embedding(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_tensor("output.weight", np.zeros((4, 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(PagewireError, match=r"lacks token_embd\.weight"):
        read_spec(tmp_path / "m.gguf")
