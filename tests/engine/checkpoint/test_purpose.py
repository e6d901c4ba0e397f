"""What a checkpoint is for follows from its class: generative classes generate, and bodies without a head embed."""

import json
import re
from pathlib import Path
from typing import Any

import families
import numpy as np
import pooling_checkpoints
import pytest
import torch
import transformers
import vocabulary
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, MODEL_MAPPING_NAMES

from pagewire import LLM
from pagewire.engine.checkpoint.purpose import causal_name, is_generative
from pagewire.engine.checkpoint.spec import is_native, read_spec
from pagewire.engine.models.families import pages

_EVERY_TIME = ("qwen3", "gpt2", "falcon", "gemma3_text", "opt")  # the others are for `make test-long`
# Their files have other names than the class that transformers reads them with.
_RENAMED = ("exaone", "sarvam_mla", "sarvam_moe")
_DESCRIBED = [
    kind
    for kind, name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items()
    if name in pages() and kind not in _RENAMED and not transformers.CONFIG_MAPPING[kind].sub_configs  # no wrapper
]
DESCRIBED = [kind if kind in _EVERY_TIME else pytest.param(kind, marks=pytest.mark.long) for kind in _DESCRIBED]
TEXTS = ["the cat sat on the mat", "a", "the river bank " * 9]


def test_every_generative_class_of_transformers_is_recognized_by_its_name() -> None:
    """Compared with the classes' sources, since importing all of them takes minutes."""
    models = Path(transformers.__file__).parent / "models"
    sources = (file.read_text() for file in models.glob("*/modeling_*.py"))
    names = {name for text in sources for name in re.findall(r"^class (\w+)\([^)]*GenerationMixin", text, re.MULTILINE)}
    assert len(names) > 300 and "GPT2LMHeadModel" in names
    assert {name for name in names if not is_generative(name)} == set()


def make_body(folder: Path, config: Any) -> Any:
    """Writes a checkpoint of the class without a head, whose names have no prefix; returns the model."""
    torch.manual_seed(1)
    model: Any = transformers.AutoModel.from_config(config, dtype=torch.float32)
    model.save_pretrained(folder)
    vocabulary.add_tokenizer(folder)
    return model.eval()


def embed(folder: Path) -> list[tuple[list[int], list[float]]]:
    """The ids and the vector of each text."""
    llm = LLM(str(folder), dtype="float32", threads=1, kv_cache_memory="8M", max_num_batched_tokens=16)
    return [(output.prompt_token_ids, output.outputs.embedding) for output in llm.embed(TEXTS, use_tqdm=False)]


@pytest.mark.slow
@pytest.mark.parametrize("kind", DESCRIBED)
def test_a_body_without_a_head_makes_embeddings(kind: str, tmp_path: Path) -> None:
    make_body(tmp_path, families.tiny(kind))
    assert json.loads((tmp_path / "config.json").read_text())["architectures"] == [MODEL_MAPPING_NAMES[kind]]
    spec = read_spec(tmp_path)
    assert is_native(spec) and spec.architecture == MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[kind]
    assert spec.purpose.tasks == ("embed",) and spec.purpose.pooling == "last"
    bound = 2e-4 if kind == "zamba2" else 1e-5  # transformers' own distance from float64 is 1e-4 to 8e-4 there
    for ids, vector in embed(tmp_path):
        expected = pooling_checkpoints.reference_embedding(tmp_path, ids, "lasttoken")
        np.testing.assert_allclose(vector, expected.numpy(), atol=bound, rtol=0)


@pytest.mark.slow
def test_the_body_of_a_wrapper_makes_embeddings_of_text(tmp_path: Path) -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
    vision = {**sizes, "image_size": 28, "patch_size": 14, "vision_use_head": False}
    text = families.tiny("gemma3_text").to_dict()
    model = make_body(tmp_path, transformers.Gemma3Config(text_config=text, vision_config=vision))
    assert read_spec(tmp_path).purpose.tasks == ("embed",)
    for ids, vector in embed(tmp_path):
        with torch.inference_mode():
            state = model(input_ids=torch.tensor([ids])).last_hidden_state[0, -1]
        expected = torch.nn.functional.normalize(state, dim=-1)
        np.testing.assert_allclose(vector, expected.numpy(), atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("gemma3_text", {"use_bidirectional_attention": True}),  # EmbeddingGemma
        ("opt", {"word_embed_proj_dim": 32}),
        ("persimmon", {}),
    ],
)
def test_a_body_that_is_not_described_runs_in_transformers(kind: str, changes: dict[str, Any], tmp_path: Path) -> None:
    make_body(tmp_path, families.tiny(kind))
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    spec = read_spec(tmp_path)
    assert not is_native(spec) and spec.purpose.is_encoder and spec.architecture == MODEL_MAPPING_NAMES[kind]


def test_names_of_bodies() -> None:
    assert causal_name("GPT2Model") == "GPT2LMHeadModel"
    assert causal_name("Gemma3TextModel") == "Gemma3ForCausalLM"
    for name in ("BertModel", "PersimmonModel", "Qwen3ForSequenceClassification", "GPT2LMHeadModel"):
        assert causal_name(name) == name
