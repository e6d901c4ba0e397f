"""Dummy weights: random but the same each time, for every native architecture."""

import json
from pathlib import Path

import checkpoints
import pytest
import torch
import vocabulary

from pagewire import LLM, SamplingParams
from pagewire.engine.weights.dummy import Dummy
from pagewire.errors import ConfigError
from pagewire.tools.make_checkpoint import SHAPES, make_checkpoint


def test_matrices_get_small_distinct_values_and_vectors_are_neutral() -> None:
    dummy, a, b = Dummy(), torch.empty(1500, 800), torch.empty(1500, 800, dtype=torch.bfloat16)
    norm, bias = torch.empty(64), torch.empty(2, 64)
    for name, values in (("0.1.gate_up", a), ("0.1.down", b), ("norm", norm), ("0.0.qkv.bias", bias)):
        dummy.fill(name, values, is_vector=values is norm or values is bias)
    assert 0.019 < a.std() < 0.021 and a.isfinite().all() and b.isfinite().all()
    assert len({tuple(row[:4].tolist()) for row in a}) == 1500 and not torch.equal(a.bfloat16(), b)
    assert (norm == 1).all() and (bias == 0).all()


@pytest.mark.parametrize("kind", ["llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "mixtral"])
def test_every_native_architecture_runs_with_dummy_weights(kind: str, tmp_path: Path) -> None:
    checkpoints.make_checkpoint(tmp_path, kind)
    vocabulary.add_tokenizer(tmp_path)
    for file in tmp_path.glob("*.safetensors"):
        file.unlink()
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    options = {"load_format": "dummy", "kv_cache_memory": "8M", "threads": 1}
    outputs = [LLM(str(tmp_path), **options).generate("hello", params, use_tqdm=False) for _ in range(2)]
    assert len(outputs[0][0].outputs[0].token_ids) == 8 and outputs[0][0].outputs == outputs[1][0].outputs


def test_the_fallback_refuses_dummy_weights(tmp_path: Path) -> None:
    checkpoints.make_checkpoint(tmp_path, "persimmon")
    vocabulary.add_tokenizer(tmp_path)
    with pytest.raises(ConfigError, match=r"dummy needs a model that pagewire describes; transformers runs Persimmon"):
        LLM(str(tmp_path), load_format="dummy")


_TINY = {"vocab_size": 32_000, "hidden_size": 64, "moe_intermediate_size": 32, "num_experts": 8, "num_hidden_layers": 2}


@pytest.mark.parametrize("like", ["llama-15m", "qwen3-30b-a3b"])
def test_make_checkpoint_writes_checkpoints_that_load_with_and_without_dummy(
    like: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if like == "qwen3-30b-a3b":
        monkeypatch.setitem(SHAPES, like, {**SHAPES[like], **_TINY})
    make_checkpoint(tmp_path, like, weights=True)
    assert json.loads((tmp_path / "config.json").read_text())["hidden_size"] == SHAPES[like]["hidden_size"]
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    texts = []
    for load_format in ("auto", "dummy"):
        llm = LLM(str(tmp_path), load_format=load_format, dtype="float32", kv_cache_memory="16M", threads=1)
        (output,) = llm.generate("hello", params, use_tqdm=False)
        assert len(output.outputs[0].token_ids) == 6
        texts.append(output.outputs[0].text)
    assert all(len(text) >= 12 for text in texts), "every id is a word"
