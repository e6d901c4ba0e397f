"""Models that also see or hear serve their text: tokens against transformers' classes of the whole model."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from checkpoints import COMMON, VOCAB_SIZE
from family_kinds import KINDS, load_kind, make_kind
from runner_driver import Driver, Request, engine_config
from safetensors.torch import load_file, save_file

from pagewire.engine.checkpoint.spec import read_spec
from pagewire.engine.runner.runner import Runner
from pagewire.errors import UnsupportedModel

_TEXT: dict[str, Any] = {
    **COMMON,
    "sliding_window": 24,
    **{"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "first_k_dense_replace": 1},
    **{"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "n_shared_experts": 1},
    **{"q_lora_rank": 8, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 12},
}
_TOWER: dict[str, Any] = {
    **{"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4, "head_dim": 8},
    **{"image_size": 28, "patch_size": 14, "depth": 2, "num_heads": 4, "embed_dim": 32, "out_hidden_size": 64},
    **{"num_key_value_heads": 4, "num_position_embeddings": 16, "deepstack_visual_indexes": [0]},
    **{"fullatt_block_indexes": [0], "vision_use_head": False, "d_model": 32},
    **{"encoder_layers": 1, "encoder_attention_heads": 2, "encoder_ffn_dim": 32},
}
_ROPE = {"rope_type": "default", "rope_theta": 1e4}
_ALL, _HALF = {**_ROPE, "mrope_section": [2, 3, 3]}, {**_ROPE, "partial_rotary_factor": 0.5, "mrope_section": [1, 1, 2]}

# (the wrapper, the model_type of its text model)
WRAPPERS = [
    ("AyaVision", "cohere2"), ("Cohere2Vision", "cohere2"), ("DeepseekVL", "llama"), ("Exaone4_5_", "exaone4"),
    ("Glm46V", "glm4v_text"), ("Glm4v", "glm4v_text"), ("Glm4vMoe", "glm4v_moe_text"), ("GlmOcr", "glm_ocr_text"),
    ("Idefics3", "llama"), ("InternVL", "qwen3"), ("Janus", "llama"), ("Kimi_K25", "deepseek_v3"),
    ("LightOnOcr", "qwen3"), ("Llava", "llama"), ("LlavaNext", "mistral"), ("LlavaNextVideo", "llama"),
    ("LlavaOnevision", "qwen2"), ("Mistral3", "ministral3"), ("Mistral3", "mistral4"), ("Ovis2", "qwen2"),
    ("Qwen2Audio", "qwen2"), ("Qwen2VL", "qwen2_vl_text"), ("Qwen2_5_VL", "qwen2_5_vl_text"),
    ("Qwen3VL", "qwen3_vl_text"), ("Qwen3VLMoe", "qwen3_vl_moe_text"), ("SmolVLM", "llama"), ("VipLlava", "llama"),
    ("Voxtral", "llama"),
]  # fmt: skip
_LARGE = {"Janus", "Ovis2", "Cohere2Vision"}  # parts of their towers have no sizes to set


def _fitting(config_class: Any, fields: dict[str, Any]) -> dict[str, Any]:
    """Those that the class has."""
    known = {field.name for field in dataclasses.fields(config_class)} | {*config_class.attribute_map}
    return {name: value for name, value in fields.items() if name in known | {*COMMON} - {"head_dim"}}


def _make(folder: Path, name: str, kind: str) -> Any:
    """Writes a tiny random model; returns it."""
    config_class: Any = getattr(transformers, f"{name}Config")
    text_class: Any = transformers.CONFIG_MAPPING[kind]
    text = _fitting(text_class, _TEXT)
    if "vl" in kind or kind.startswith("glm"):
        text["rope_parameters"] = _HALF if kind in ("glm4v_moe_text", "glm_ocr_text") else _ALL
    if kind in ("deepseek_v3", "mistral4"):
        text["num_key_value_heads"] = COMMON["num_attention_heads"]
    towers = {part: type(getattr(config_class(), part)) for part in config_class.sub_configs if part != "text_config"}
    parts = {part: {**_fitting(made, _TOWER), "model_type": made.model_type} for part, made in towers.items()}
    config = config_class(text_config={**text, "model_type": kind}, **parts)
    torch.manual_seed(3)
    model: Any = getattr(transformers, f"{name}ForConditionalGeneration")(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * 0.2)
            elif parameter.ndim == 3:
                parameter.normal_(std=0.25)
    model.save_pretrained(folder)
    if name == "Kimi_K25":  # transformers renames layers of the tower, and by mistake also those of the text model
        tensors = load_file(folder / "model.safetensors")
        layers = {each.replace("language_model.model.blocks", "language_model.model.layers"): each for each in tensors}
        save_file({new: tensors[old] for new, old in layers.items()}, folder / "model.safetensors")
    return model


@pytest.mark.parametrize(
    ("name", "kind"),
    [pytest.param(*each, marks=pytest.mark.long) if each[0] in _LARGE else each for each in WRAPPERS],
)
def test_the_text_is_served(name: str, kind: str, tmp_path: Path) -> None:
    """The tensors of towers are not read, and the start says how many they are."""
    check_text(tmp_path, _make(tmp_path, name, kind))


def check_text(folder: Path, model: Any) -> None:
    runner = Runner.load(engine_config(folder))
    assert "tensors that are not for text" in "\n".join(runner.notes)
    runner.open_cache(64)
    prompt = [5 + i * 7 % (VOCAB_SIZE - 5) for i in range(70)]
    request = Request(prompt, max_new=6)
    Driver(runner, 64).run([request], chunk=32)
    with torch.inference_mode():
        logits = model(input_ids=torch.tensor([prompt + request.output])).logits[0, len(prompt) - 1 : -1]
    assert logits.argmax(-1).tolist() == request.output


def test_gemma_3n_serves_its_text(tmp_path: Path) -> None:
    """Its tower needs a library of its own, so the file is that of the text model under other names. Rotary embeddings
    have the fields of older files."""
    made, folder = make_kind(tmp_path / "text", *KINDS["Gemma3nText-0"]), tmp_path / "whole"
    model = load_kind(made, *KINDS["Gemma3nText-0"])
    text = json.loads((made / "config.json").read_text())
    ropes = text.pop("rope_parameters")
    text["rope_theta"] = ropes["full_attention"]["rope_theta"]
    text["rope_local_base_freq"] = ropes["sliding_attention"]["rope_theta"]
    parts = {"vision_config": {"model_type": "gemma3n_vision"}, "audio_config": {"model_type": "gemma3n_audio"}}
    whole = {
        "architectures": ["Gemma3nForConditionalGeneration"],
        "model_type": "gemma3n",
        "text_config": text,
        **parts,
    }
    tensors = load_file(made / "model.safetensors")
    named = {name.replace("model.", "model.language_model.", 1): tensor for name, tensor in tensors.items()}
    named |= {"model.vision_tower.stem.weight": torch.zeros(4), "model.embed_audio.embedding.weight": torch.zeros(4, 4)}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(whole))
    save_file(named, folder / "model.safetensors", metadata={"format": "pt"})
    check_text(folder, model)


_NOT_COVERED = (
    r"cannot be served: it has inputs other than text \(images\), and pagewire's description of this family does not "
    "cover a text model of the kind 'persimmon'"
)


def test_a_text_model_without_a_page_is_refused(tmp_path: Path) -> None:
    text = {**_fitting(transformers.CONFIG_MAPPING["persimmon"], COMMON), "model_type": "persimmon"}
    config: Any = transformers.LlavaConfig(text_config=text)
    config.architectures = ["LlavaForConditionalGeneration"]
    config.save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModel, match=_NOT_COVERED):
        read_spec(tmp_path)


def test_the_fields_that_llava_files_leave_out(tmp_path: Path) -> None:
    """The text model's fields are those that differ from LlamaConfig's defaults."""
    (tmp_path / "config.json").write_text(
        '{"architectures": ["LlavaForConditionalGeneration"], "model_type": "llava", "vision_config": {},'
        ' "text_config": {"model_type": "llama", "vocab_size": 32064, "max_position_embeddings": 4096}}'
    )
    spec = read_spec(tmp_path)
    assert spec.decoder is not None and (spec.decoder.hidden, len(spec.decoder.blocks)) == (4096, 32)
