"""Every family's page reads each number of its checkpoint once, and no tensor that the checkpoint lacks."""

import json
from pathlib import Path

import checkpoints
import families
import pytest
from claims import claims, shapes, sources
from decoders import of_checkpoint
from safetensors import safe_open
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from pagewire.engine.models.description import Decoder
from pagewire.engine.models.families import describe, pages, text_fields
from pagewire.engine.models.fields import Fields, NotDescribedError
from pagewire.engine.models.lower import lower
from pagewire.engine.weights.mapping import Names

_TYPES = {name: kind for kind, name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items() if isinstance(name, str)}
DESCRIBED = [kind for kind in checkpoints.KINDS if of_checkpoint(kind) is not None]


def check_claims(decoder: Decoder, present: set[str]) -> dict[str, tuple[int, ...]]:
    """The shapes of the tensors, of which each number is read once."""
    program = lower(decoder)
    found = shapes(decoder, program, present)
    tied = tied_tables(decoder, present)
    for name, counts in claims(sources(decoder, program, present), found).items():
        num = 2 if name in tied else 1
        assert (counts == num).all(), f"{name}: numbers are read {sorted(set(counts.flatten().tolist()))} times"
    return found


def tied_tables(decoder: Decoder, present: set[str]) -> set[str]:
    """The embedding, if it is read once more as a head that the file leaves out."""
    head = decoder.head.weight
    if not present or head is None or head.other != decoder.embedding.table:
        return set()
    own, table = ([part.name for part in weight.parts] for weight in (head, head.other))
    return set() if present.issuperset(own) else set(table)


@pytest.mark.parametrize("architecture", sorted(pages()))
def test_each_number_of_each_tensor_is_read_once(architecture: str) -> None:
    """For a tiny config, with the names that a checkpoint of the Hub has."""
    if architecture not in _TYPES:
        pytest.skip("transformers has no class of this name")
    raw = families.tiny_config(_TYPES[architecture])
    if isinstance(text := raw.get("text_config"), dict):
        raw["text_config"] = families.tiny_config(text["model_type"])
    try:
        decoder = describe(architecture, Fields(raw, Path("config.json")))
    except NotDescribedError as error:
        pytest.skip(error.why)
    assert check_claims(decoder, set())


@pytest.mark.parametrize("kind", DESCRIBED)
def test_the_tensors_are_those_that_transformers_writes(kind: str, tmp_path: Path) -> None:
    folder = checkpoints.make_checkpoint(tmp_path, kind)
    raw = json.loads((folder / "config.json").read_text())
    decoder = describe(raw["architectures"][0], Fields(raw, folder / "config.json"))
    with safe_open(folder / "model.safetensors", "np") as file:
        written = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118  # no mapping
    names = Names(decoder, written)
    read = {name: bare(shape) for name, shape in written.items() if not names.is_ignored(name)}
    assert {name: bare(shape) for name, shape in check_claims(decoder, {*written}).items()} == read


def bare(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Without dimensions of size 1, which convolutions have."""
    return tuple(size for size in shape if size != 1)


def test_the_fields_of_older_mimo_files() -> None:
    """Those of the Hub, and those that transformers writes."""
    common = {
        "vocab_size": 90, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 8, "head_dim": 48,
        "num_key_value_heads": 2, "v_head_dim": 32, "n_routed_experts": 4, "num_experts_per_tok": 2,
        "routed_scaling_factor": None, "num_hidden_layers": 4,
    }  # fmt: skip
    older = {
        "hybrid_layer_pattern": [0, 1, 1, 0], "moe_layer_freq": [0, 1, 0, 1], "layernorm_epsilon": 1e-5,
        "rope_theta": 5e6, "swa_rope_theta": 2e4, "partial_rotary_factor": 0.334, "sliding_window_size": 128,
        "swa_num_key_value_heads": 4, "add_swa_attention_sink_bias": True, "add_full_attention_sink_bias": False,
    }  # fmt: skip
    newer = {
        "layer_types": ["full_attention", "sliding_attention", "sliding_attention", "full_attention"],
        "mlp_layer_types": ["dense", "sparse", "dense", "sparse"],
        "rms_norm_eps": 1e-5,
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 5e6, "partial_rotary_factor": 0.334},
            "sliding_attention": {"rope_type": "default", "rope_theta": 2e4, "partial_rotary_factor": 0.334},
        },
        "sliding_window": 129,
    }
    name, path = "MiMoV2FlashForCausalLM", Path("config.json")
    first, second = (describe(name, Fields({**common, **fields}, path)) for fields in (older, newer))
    assert first is not None and first == second


def test_an_architecture_without_a_page() -> None:
    with pytest.raises(NotDescribedError) as caught:
        describe("NobodyForCausalLM", Fields({}, Path("config.json")))
    assert caught.value.why == "pagewire does not describe this family"
    variant = NotDescribedError("the activation 'mish'")
    assert variant.why == "pagewire's description of this family does not cover the activation 'mish'"


def test_the_text_part_of_a_wrapper() -> None:
    raw = {"text_config": {"hidden_size": 4}, "tie_word_embeddings": True, "hidden_size": 9}
    inner = text_fields(Fields(raw, Path("config.json")))
    assert inner.size("hidden_size") == 4 and inner.flag("tie_word_embeddings", False)
    plain = Fields({"hidden_size": 9}, Path("config.json"))
    assert text_fields(plain) is plain
