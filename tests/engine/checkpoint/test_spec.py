"""Reading config.json, valid and invalid."""

import json
import os
import shutil
import subprocess
import sys

import checkpoints
import families
import pytest
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from pagewire.config.config import Config, MachineFacts, SamplingDefaults
from pagewire.config.flags import make_config
from pagewire.config.resolve import resolve
from pagewire.engine.checkpoint.spec import fingerprint, model_facts, read_spec
from pagewire.engine.models.description import Attention, Mlp, Moe, Reach
from pagewire.errors import ConfigError

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "torch_dtype": "float16",
    "eos_token_id": 2,
}


def _folder(path, generation=None, **changes):
    fields = {name: value for name, value in {**LLAMA, **changes}.items() if value != "absent"}
    (path / "config.json").write_text(json.dumps(fields))
    if generation is not None:
        (path / "generation_config.json").write_text(json.dumps(generation))
    return path


def _bodies(spec, kind):
    """The layers' parts of a kind."""
    return [body for body in spec.decoder.bodies if isinstance(body, kind)]


def test_missing_fields_of_an_old_llama_config_get_their_defaults(tmp_path):
    spec = read_spec(_folder(tmp_path, rope_theta=5e5))
    assert (spec.num_kv_heads, spec.head_dim, spec.dtype) == (4, 16, "float16")
    for attention in _bodies(spec, Attention):
        assert (attention.kv_heads, attention.head_dim, attention.rope.theta) == (4, 16, 5e5)
        assert attention.reach == Reach()
    assert spec.decoder.head.weight is not None, "a head of its own"


def test_model_facts_come_from_the_config(tmp_path):
    facts = model_facts(read_spec(_folder(tmp_path)), tmp_path, "tiny")
    assert (facts.path, facts.name, facts.max_position, facts.vocab_size) == (str(tmp_path), "tiny", 128, 100)
    assert (facts.eos_token_ids, facts.checkpoint_dtype) == ((2,), "float16")


def test_fingerprints_tell_checkpoints_apart(tmp_path):
    """They depend on weights, config and headers, not on other files or on the folder's path."""
    checkpoints.make_checkpoint(tmp_path / "a", "llama")
    shutil.copytree(tmp_path / "a", tmp_path / "b")  # keeps modification times
    fingerprints = [fingerprint(tmp_path / "a")]
    assert fingerprint(tmp_path / "b") == fingerprints[0] and len(bytes.fromhex(fingerprints[0])) == 32
    (tmp_path / "b" / "notes.txt").write_text("x")
    assert fingerprint(tmp_path / "b") == fingerprints[0]
    weights = tmp_path / "b" / "model.safetensors"
    data, times = bytearray(weights.read_bytes()), weights.stat()

    def expect_change():
        fingerprints.append(fingerprint(tmp_path / "b"))
        assert len(set(fingerprints)) == len(fingerprints)

    os.utime(weights, ns=(times.st_atime_ns, times.st_mtime_ns + 1))
    expect_change()
    data[20] ^= 1  # in the header
    weights.write_bytes(data)
    os.utime(weights, ns=(times.st_atime_ns, times.st_mtime_ns))
    expect_change()
    weights.write_bytes(data + b"x")
    os.utime(weights, ns=(times.st_atime_ns, times.st_mtime_ns))
    expect_change()
    weights.rename(weights.with_name("other.safetensors"))
    expect_change()
    (tmp_path / "b" / "config.json").write_text("{}")
    expect_change()
    (tmp_path / "b" / "config.json").unlink()
    with pytest.raises(ConfigError, match=r"config\.json cannot be read"):
        fingerprint(tmp_path / "b")


def test_the_model_key_depends_on_options_that_change_kv(tmp_path):
    checkpoints.make_checkpoint(tmp_path, "llama")
    facts = model_facts(read_spec(tmp_path), tmp_path, "tiny")
    plain = resolve(Config(), facts, MachineFacts(num_cores=1))
    assert len(plain.kv_model_key) == 32
    assert (
        resolve(make_config(max_model_len=64, port=1), facts, MachineFacts(num_cores=2)).kv_model_key
        == plain.kv_model_key
    )
    others = [make_config(dtype="bfloat16"), make_config(extension="some:Extension")]
    keys = {resolve(config, facts, MachineFacts(num_cores=1)).kv_model_key for config in others}
    assert len(keys | {plain.kv_model_key}) == 3


@pytest.mark.parametrize(
    ("config", "generation", "expected"),
    [(2, None, (2,)), ([2, 3], {"eos_token_id": [4, 3]}, (4, 3, 2)), (None, {"eos_token_id": 9}, (9,)), (-1, {}, ())],
)
def test_eos_ids_come_from_both_files(config, generation, expected, tmp_path):
    assert read_spec(_folder(tmp_path, generation, eos_token_id=config)).eos_token_ids == expected


@pytest.mark.parametrize(
    ("generation", "expected"),
    [
        (None, SamplingDefaults()),
        ({"do_sample": False, "temperature": 0.6}, SamplingDefaults(temperature=0.0)),
        (
            {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95},
            SamplingDefaults(temperature=0.6, top_k=20, top_p=0.95),
        ),
        ({"min_p": 0, "top_k": 0, "repetition_penalty": 1.1}, SamplingDefaults(repetition_penalty=1.1)),
    ],
)
def test_sampling_defaults_come_from_the_generation_config(generation, expected, tmp_path):
    assert read_spec(_folder(tmp_path, generation)).sampling == expected


@pytest.mark.parametrize("kind", list(checkpoints.KINDS))
def test_configs_that_transformers_writes_are_read(kind, tmp_path):
    spec = read_spec(folder := checkpoints.make_checkpoint(tmp_path, kind))
    raw = json.loads((folder / "config.json").read_text())
    names = ("num_decoder_layers", "decoder_layers") if kind in checkpoints.ENCODER_DECODERS else ("num_hidden_layers",)
    num_layers = next(raw[name] for name in names if name in raw)
    assert (spec.vocab_size, spec.hidden_size, spec.num_layers) == (checkpoints.VOCAB_SIZE, 64, num_layers)
    assert (spec.max_position, spec.eos_token_ids, spec.bos_token_id, spec.dtype) == (1024, (2,), 1, "float32")
    if spec.decoder is None:
        assert kind == "persimmon", "the only kind without a page"
        return
    windows = {
        "mistral": (40,) * 3,
        "qwen2-sliding": (0, 24, 24),
        "qwen3_moe-sparse": (24,) * 3,
        "mixtral": (40,) * 3,
        "gemma3": (40, 0, 40),
    }
    if kind != "gemma2":
        reaches = tuple(attention.reach.positions for attention in _bodies(spec, Attention))
        assert reaches == windows.get(kind, (0,) * len(reaches)) and (reaches or spec.decoder.is_recurrent)


def test_expert_fields_are_read_in_both_spellings(tmp_path):
    """In the spelling of checkpoints on the Hub, and in that of transformers 5."""
    sizes = {"num_experts_per_tok": 2, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4}
    mixtral = {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "num_local_experts": 8, **sizes}
    moes = _bodies(read_spec(_folder(tmp_path, **mixtral)), Moe)
    assert len(moes) == 4
    for moe in moes:
        assert (moe.num_experts, moe.experts.width) == (8, 96)
        assert (moe.router.top_k, moe.router.renorm, moe.router.rounds_weights) == (2, True, False)
    qwen = {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "moe_intermediate_size": 32, **sizes}
    for spelled in ("num_experts", "num_local_experts"):
        moes = _bodies(read_spec(_folder(tmp_path, **qwen, **{spelled: 16})), Moe)
        assert len(moes) == 4
        assert {(moe.num_experts, moe.experts.width, moe.router.renorm) for moe in moes} == {(16, 32, False)}
    changes = {"norm_topk_prob": True, "decoder_sparse_step": 2, "mlp_only_layers": [3]}
    bodies = _bodies(read_spec(_folder(tmp_path, **qwen, **changes)), (Mlp, Moe))
    assert [type(body) for body in bodies] == [Mlp, Moe, Mlp, Mlp]
    assert (bodies[1].num_experts, bodies[1].router.renorm, bodies[1].router.rounds_weights) == (128, True, True)
    assert not _bodies(read_spec(_folder(tmp_path, **qwen, mlp_only_layers=[0, 1, 2, 3])), Moe)
    assert not _bodies(read_spec(_folder(tmp_path, **sizes, num_local_experts=8)), Moe), "Llama has no experts"


def test_gpt2_has_other_names_for_its_sizes(tmp_path):
    fields = {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "vocab_size": 50,
        "n_embd": 32,
        "n_layer": 3,
        "n_head": 2,
        "n_positions": 64,
    }
    (tmp_path / "config.json").write_text(json.dumps(fields))
    spec = read_spec(tmp_path)
    assert (spec.hidden_size, spec.num_layers, spec.num_kv_heads, spec.max_position) == (32, 3, 2, 64)


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"architectures": "absent"}, "names no architecture"),
        ({"architectures": []}, "names no architecture"),
        ({"hidden_size": 0}, "hidden_size = 0, which should be a positive whole number"),
        ({"vocab_size": -5}, "vocab_size = -5"),
        ({"num_hidden_layers": "four"}, "num_hidden_layers = 'four'"),
        ({"num_hidden_layers": 2.5}, r"num_hidden_layers = 2\.5"),
        ({"vocab_size": "absent"}, "has no vocab_size"),
        ({"num_key_value_heads": 3}, "4 attention heads, no multiple of its 3 key/value heads"),
        ({"hidden_size": 2}, "has no head_dim, and its other sizes give 0"),
        ({"head_dim": 5}, "head_dim of 5, which is odd"),
        ({"rms_norm_eps": 0}, "rms_norm_eps = 0"),
        ({"rope_scaling": 3}, "rope_scaling = 3, which should be an object"),
        ({"rope_scaling": {"type": "linear", "factor": -1}}, "factor = -1"),
        ({"eos_token_id": "</s>"}, "eos_token_id = '</s>', which should be a token id"),
        ({"torch_dtype": "int8"}, "dtype = 'int8'; pagewire reads"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings = 1, which should be true or false"),
        ({"quantization_config": {"quant_method": "quip"}}, "weights quantized with quip"),
        ({"quantization_config": 4}, "quantization_config = 4, which should be an object"),
        (
            {"architectures": ["MixtralForCausalLM"], "num_experts_per_tok": 9},
            "num_experts_per_tok = 9, but there are 8",
        ),
        (
            {"architectures": ["Qwen3MoeForCausalLM"], "mlp_only_layers": 3},
            "mlp_only_layers = 3, which should be a list",
        ),
        ({"architectures": ["Qwen3MoeForCausalLM"], "mlp_only_layers": ["0"]}, "which should be a list of numbers"),
        (
            {"architectures": ["Qwen2ForCausalLM"], "use_sliding_window": True, "sliding_window": 4}
            | {"layer_types": ["x"]},
            "2 layers but 1 layer_types",
        ),
    ],
)
def test_invalid_fields_are_refused(changes, complaint, tmp_path):
    with pytest.raises(ConfigError, match=complaint) as caught:
        read_spec(_folder(tmp_path, **changes))
    assert "\n" not in str(caught.value)
    assert str(caught.value).endswith(".")


def test_folders_without_a_readable_config_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="There is no model folder"):
        read_spec(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match=r"has no config\.json, so it is not a model folder"):
        read_spec(tmp_path)
    for text in ("", "{", "[1]", "\xff"):
        (tmp_path / "config.json").write_bytes(text.encode("latin-1"))
        with pytest.raises(ConfigError, match=r"config\.json is damaged"):
            read_spec(tmp_path)


def test_reading_a_spec_does_not_import_torch_or_numpy():
    code = "import sys, pagewire.engine.checkpoint.spec; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(
    ("kind", "changes", "expected"),
    [("llama", {}, True), ("llama", {"head_dim": 24}, False), ("gemma4_text", {}, True), ("gpt_oss", {}, True),
     ("bloom", {}, True), ("llama4_text", {}, True), ("deepseek_v3", {}, True), ("mimo_v2_flash", {}, True),
     ("mimo_v2_flash", {"v_head_dim": 24}, False)],
)  # fmt: skip
def test_the_facts_say_whether_c_has_the_attention_of_all_layers(kind, changes, expected, tmp_path):
    config = {**families.tiny_config(kind), **changes}
    names = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[kind]
    (tmp_path / "config.json").write_text(json.dumps({**config, "architectures": [names]}))
    spec = read_spec(tmp_path)
    assert spec.decoder is not None and model_facts(spec, tmp_path, "tiny").attends_in_c is expected


def test_a_recurrent_model_has_neither_heads_nor_a_limit_of_positions(tmp_path):
    fields = {"architectures": ["MambaForCausalLM"], "model_type": "mamba", "torch_dtype": "absent"}
    absent = dict.fromkeys(("num_attention_heads", "max_position_embeddings", "intermediate_size"), "absent")
    spec = read_spec(_folder(tmp_path, **fields, **absent))
    assert spec.decoder.is_recurrent and spec.max_position == 131_072
    limited = read_spec(_folder(tmp_path, **fields, **absent | {"max_position_embeddings": 512}))
    assert limited.max_position == 512


def test_the_number_of_layers_is_that_of_the_description(tmp_path):
    fields = {"architectures": ["NemotronHForCausalLM"], "num_hidden_layers": "absent"}
    spec = read_spec(_folder(tmp_path, **fields, hybrid_override_pattern="M-*M"))
    assert spec.num_layers == 4 and not spec.decoder.is_recurrent
