"""Models that also see or hear, of which pagewire serves the text part: the pages of their text models, by the
`model_type` of `text_config`.

A text of such a model is computed as by the text model alone: the axes of a multimodal rotary embedding have equal
positions there. Models whose prompts are read in both directions (PaliGemma) are not among them.
"""

from dataclasses import replace

from ..description import Decoder
from ..fields import Fields, NotDescribedError
from ..pieces import TOWERS, WRAPPED
from ..registry import PAGES, family

# model_type of the text model → the architecture whose page describes it.
_TEXTS = {
    "cohere2": "Cohere2ForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "exaone4": "Exaone4ForCausalLM",
    "gemma": "GemmaForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "glm4": "Glm4ForCausalLM",
    "glm4_moe": "Glm4MoeForCausalLM",
    "glm4v_text": "Glm4vForConditionalGeneration",
    "gpt_oss": "GptOssForCausalLM",
    "granite": "GraniteForCausalLM",
    "kimi_k2": "DeepseekV3ForCausalLM",
    "llama": "LlamaForCausalLM",
    "ministral3": "Ministral3ForCausalLM",
    "mistral": "MistralForCausalLM",
    "mistral4": "Mistral4ForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen2_5_vl": "Qwen2ForCausalLM",  # files whose fields are not in an object of their own
    "qwen2_5_vl_text": "Qwen2ForCausalLM",
    "qwen2_vl": "Qwen2ForCausalLM",
    "qwen2_vl_text": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "qwen3_vl_moe_text": "Qwen3VLMoeForConditionalGeneration",
    "qwen3_vl_text": "Qwen3ForCausalLM",
    "smollm3": "SmolLM3ForCausalLM",
}

# Of transformers' classes, which files leave out: LLaVA's have the text model's fields that differ from them.
DEFAULTS: dict[str, dict[str, object]] = {
    "llama": {
        "vocab_size": 32000,
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
    },
    "mistral": {
        "vocab_size": 32000,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
    },
    **{
        kind: {"rms_norm_eps": 1e-5, "rope_theta": 1e6}
        for kind in ("qwen2_vl", "qwen2_vl_text", "qwen2_5_vl", "qwen2_5_vl_text")
    },
    "qwen3_vl_text": {"rope_theta": 500_000.0},
}

# Beside the towers: what joins them to the text model.
_JOINTS = (
    r"(model\.)?(image_newline|connector\..*|aligner\..*|mm_projector\..*|mlp1\..*|projector\..*)",
    r"(model\.)?(vqmodel|generation_\w+|visual_embeddings_table|vision_projection)\..*",
)


@family(
    "AyaVisionForConditionalGeneration",
    "Cohere2VisionForConditionalGeneration",
    "DeepseekVLForConditionalGeneration",
    "Exaone4_5_ForConditionalGeneration",
    "Idefics3ForConditionalGeneration",
    "InternVLForConditionalGeneration",
    "JanusForConditionalGeneration",
    "KimiK25ForConditionalGeneration",
    "KimiVLForConditionalGeneration",
    "Kimi_K25ForConditionalGeneration",
    "LightOnOcrForConditionalGeneration",
    "LlavaForConditionalGeneration",
    "LlavaNextForConditionalGeneration",
    "LlavaNextVideoForConditionalGeneration",
    "LlavaOnevisionForConditionalGeneration",
    "Mistral3ForConditionalGeneration",
    "Ovis2ForConditionalGeneration",
    "Qwen2AudioForConditionalGeneration",
    "Qwen2VLForConditionalGeneration",
    "Qwen2_5_VLForConditionalGeneration",
    "Qwen3VLForConditionalGeneration",
    "SmolVLMForConditionalGeneration",
    "VipLlavaForConditionalGeneration",
    "VoxtralForConditionalGeneration",
)
def wrapper(c: Fields) -> Decoder:
    kind = c.text("model_type", "")
    if kind not in _TEXTS:
        raise NotDescribedError(f"a text model of the kind {kind!r}")
    found = PAGES[_TEXTS[kind]](Fields(DEFAULTS.get(kind, {}) | c.raw, c.file))
    ignored = dict.fromkeys((*found.ignored, *TOWERS, *_JOINTS))
    return replace(found, prefixes=(*WRAPPED, *found.prefixes), ignored=tuple(ignored))
