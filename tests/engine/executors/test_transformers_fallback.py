"""Checkpoints that the fallback refuses, each with one sentence. test_families tests which families it serves and their
tokens; runner/test_exactness compares its computation."""

import json

import checkpoints
import families
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.models.persimmon.modeling_persimmon import PersimmonMLP

from pagewire.engine.attention.kv_cache import Tile
from pagewire.engine.checkpoint.spec import read_spec
from pagewire.engine.executors.transformers_fallback import load_fallback, outline
from pagewire.errors import CheckpointError, ConfigError, PagewireError, UnsupportedModel


def _load(folder, max_len=64, dtype=torch.float32):
    spec = read_spec(folder)
    shape = outline(spec, folder, num_numbers=1_000_000, max_len=max_len, dtype=dtype)
    cpu = torch.device("cpu")
    return load_fallback(spec, folder, max_len=max_len, dtype=dtype, device=cpu, is_certain=shape is not None)


def _refused(folder, error: type[PagewireError], complaint, **how):
    with pytest.raises(error, match=complaint) as caught:
        _load(folder, **how)
    assert "\n" not in str(caught.value)


def _change_config(folder, **changes):
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


@pytest.fixture
def folder(tmp_path):
    return checkpoints.make_checkpoint(tmp_path, "phi3")


def test_the_kv_shape_is_that_of_the_layers(tmp_path):
    model, weights = _load(checkpoints.make_checkpoint(tmp_path, "gpt_neox"))
    assert model.kv_shape.layers == (Tile(4, 16, 16),) * 3
    assert weights == sum(tensor.nbytes for tensor in load_file(tmp_path / "model.safetensors").values())


def test_an_unknown_architecture_is_refused(folder):
    _change_config(folder, model_type="nobody", architectures=["NobodyForCausalLM"])
    _refused(
        folder, ConfigError, "NobodyForCausalLM is neither an architecture that pagewire describes nor one that the ins"
    )


def test_code_in_the_folder_is_not_run(folder):
    (folder / "modeling_evil.py").write_text("raise SystemExit('code of the checkpoint was run')")
    _change_config(
        folder,
        model_type="evil",
        architectures=["EvilForCausalLM"],
        auto_map={"AutoConfig": "modeling_evil.EvilConfig", "AutoModelForCausalLM": "modeling_evil.EvilForCausalLM"},
    )
    _refused(folder, ConfigError, "EvilForCausalLM needs code from")


def test_longrope_is_refused_beyond_its_original_length(tmp_path):
    longrope = {
        "rope_type": "longrope",
        "rope_theta": 10_000.0,
        "short_factor": [1.0] * 8,
        "long_factor": [2.0] * 8,
        "factor": 4.0,
    }
    folder = checkpoints.make_checkpoint(
        tmp_path, "phi3", rope_parameters=longrope, original_max_position_embeddings=256
    )
    _refused(folder, ConfigError, "requests of more than 256 tokens, .* set --max-model-len 256", max_len=1024)
    _load(folder, max_len=256)


@pytest.mark.parametrize("kind", ["phimoe", "qwen2_moe"])
def test_a_mask_window_that_attention_calls_lack_is_refused(kind, tmp_path, monkeypatch):
    """Their masks have a window that the attention calls do not mention, longer than the rehearsal's prompts."""
    fields = {"sliding_window": 24, "use_sliding_window": True, "max_window_layers": 1}
    monkeypatch.setitem(families.FAMILIES, kind, (fields, families.SERVED))
    folder = families.make_family(tmp_path, kind)
    _refused(folder, ConfigError, "the mask of its layer 0 has a window of 24 tokens, but attention gets none")
    _load(folder, max_len=24)


def _mixes_tokens(distance):
    """A layer whose tokens add those `distance` positions before them, beside attention."""
    plain = PersimmonMLP.forward

    def forward(self, x):
        before = torch.zeros_like(x)
        before[:, distance:] = x[:, :-distance] if x.shape[1] > distance else 0
        return plain(self, x + before)

    return forward


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("distance", [1, 20])
def test_tokens_that_meet_outside_of_attention_are_refused(distance, dtype, tmp_path, monkeypatch):
    folder = checkpoints.make_checkpoint(tmp_path, "persimmon")
    _load(folder, dtype=dtype)
    monkeypatch.setattr(PersimmonMLP, "forward", _mixes_tokens(distance))
    _refused(folder, UnsupportedModel, r"trial of 64 random positions \d+ tokens differ", dtype=dtype)


def test_missing_extra_and_misshapen_tensors_are_reported(folder):
    file = folder / "model.safetensors"
    tensors = load_file(file)
    fewer = {name: tensor for name, tensor in tensors.items() if name != "model.norm.weight"}
    save_file(fewer, file, metadata={"format": "pt"})
    _refused(folder, CheckpointError, r"The checkpoint lacks 1 of the tensors of .*: model\.norm\.weight\.")
    save_file({**tensors, "extra.weight": torch.ones(2)}, file, metadata={"format": "pt"})
    _refused(folder, CheckpointError, r"Phi3ForCausalLM does not know 1 of the tensors of .*: extra\.weight\.")
    wrong = {**tensors, "model.norm.weight": torch.ones(3)}
    save_file(wrong, file, metadata={"format": "pt"})
    _refused(folder, CheckpointError, r"model\.norm\.weight has the shape \[3\] .* calls for \[64\]")
