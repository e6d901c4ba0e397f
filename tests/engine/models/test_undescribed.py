"""What only a description can serve, as the fields of a config show it."""

from pathlib import Path
from typing import Any

import families
import pytest

from pagewire.engine.models.fields import Fields
from pagewire.engine.models.undescribed import needs_description


def fields(**raw: object) -> Fields:
    return Fields(raw, Path("config.json"))


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        ({}, ""),
        ({"layer_types": ["full_attention", "sliding_attention"], "head_dim": 16, "v_head_dim": 16}, ""),
        ({"layer_types": ["conv", "mamba", "mamba2"]},
         "layers with a recurrent state (short convolutions) and layers with a recurrent state (Mamba)"),
        ({"layer_types": ["chunked_attention", "hash"]}, "chunked attention and layers of the kind 'hash'"),
        ({"layer_types": [["x"]]}, """layers of the kind "['x']\""""),
        ({"layer_types": 3, "per_layer_config": {"0": 4}}, ""),
        ({"kv_lora_rank": 16, "head_dim": 8, "v_head_dim": 12, "index_topk": 4},
         "multi-head latent attention (MLA) and sparse attention (an indexer chooses which keys a token reads)"),
        ({"head_dim": 16, "v_head_dim": 12}, "keys of 16 numbers per head and values of 12"),
        ({"num_kv_shared_layers": 3}, "keys and values of earlier layers in its last 3 (shared KV)"),
        ({"head_dim": 16, "per_layer_config": {"0": {"head_dim": 32}}}, "heads of different sizes (16 and 32)"),
        ({"alibi": True}, "position biases in its attention scores (ALiBi)"),
        ({"is_encoder_decoder": True}, "an encoder beside its decoder (encoder-decoder model)"),
        ({"vision_config": {}, "audio_token_id": 7, "alibi": True},
         "inputs other than text (audio and images) and position biases in its attention scores (ALiBi)"),
        ({"text_config": {}}, "inputs other than text (of unknown kinds)"),
        ({"rope_scaling": {}, "image_token_id": 7}, ""),
    ],
)  # fmt: skip
def test_the_words(raw: dict[str, object], words: str) -> None:
    assert needs_description(fields(**raw)) == words


def test_an_encoder_has_no_paged_attention_to_refuse() -> None:
    assert needs_description(fields(alibi=True, layer_types=["conv"], kv_lora_rank=4), generates=False) == ""
    assert "images" in needs_description(fields(vision_config={}), generates=False)
    assert "encoder-decoder" in needs_description(fields(is_encoder_decoder=True), generates=False)


FALLBACK = [kind for kind, (_, why) in families.FAMILIES.items() if not why and kind not in families.ONLY_DESCRIBED]


@pytest.mark.parametrize("kind", FALLBACK)
def test_families_that_transformers_computes_need_none(kind: str) -> None:
    """Neither by the fields that a file has, nor by those that transformers adds."""
    config: Any = families.tiny(kind)
    assert needs_description(fields(**families.tiny_config(kind))) == ""
    resolved = {**config.to_dict(), "layer_types": getattr(config, "layer_types", None)}
    assert needs_description(fields(**resolved)) == ""
