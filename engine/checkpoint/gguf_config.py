"""Puts a GGUF file's metadata into the terms of config.json and generation_config.json, so that `spec` reads both kinds
of models alike.

What the metadata does not say is read off the tensors, as llama.cpp does: biases, a head of its own, and the scaled
rotary frequencies of Llama 3 (`rope_freqs.weight`). Imports without torch.
"""

import math
from collections import Counter

from ...errors import CheckpointError, ConfigError
from .gguf import PLAIN, Gguf, read_vector

# general.architecture → what config.json would say.
ARCHITECTURES = {
    "llama": ("LlamaForCausalLM", "llama"),
    "qwen2": ("Qwen2ForCausalLM", "qwen2"),
    "qwen3": ("Qwen3ForCausalLM", "qwen3"),
    "qwen3moe": ("Qwen3MoeForCausalLM", "qwen3_moe"),
}
_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_CONTROL = 3  # the token type of tokens that control the model

# Tokens that end an output wherever a vocabulary has them as control tokens (from llama.cpp's list): many files name
# only one of their model's.
_ENDS = frozenset(
    ["<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|eom_id|>", "<EOT>", "<|end_of_text|>"]
)


def config_of(gguf: Gguf) -> dict[str, object]:
    """config.json's fields. Raises ConfigError, CheckpointError."""
    metadata, tensors = gguf.metadata, gguf.tensors
    arch = metadata.text("general.architecture")
    if arch not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise ConfigError(f"{gguf.path} has the architecture {arch}; of GGUF files pagewire serves {known}.")
    architecture, model_type = ARCHITECTURES[arch]

    def size(name: str, default: int | None = None) -> int:
        key = f"{arch}.{name}"
        value = metadata.integer(key) or default
        if value is None:
            raise ConfigError(f"{gguf.path} has no {key}.")
        if value < 1:
            raise metadata.error(key, "a positive whole number")
        return value

    embedding = tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise CheckpointError(f"{gguf.path} lacks token_embd.weight, a model's embedding, as a matrix.")
    hidden_size, num_heads, num_layers = size("embedding_length"), size("attention.head_count"), size("block_count")
    head_dim = size("attention.key_length", max(1, hidden_size // num_heads))
    _refuse_unlike(gguf, arch, head_dim)
    config: dict[str, object] = {
        "model_type": model_type,
        "vocab_size": embedding.shape[0],
        "hidden_size": hidden_size,
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
        "num_key_value_heads": size("attention.head_count_kv", num_heads),
        "head_dim": head_dim,
        "max_position_embeddings": size("context_length"),
        "rms_norm_eps": metadata.number(f"{arch}.attention.layer_norm_rms_epsilon") or 1e-6,
        "rope_parameters": _rope(gguf, arch),
        "tie_word_embeddings": "output.weight" not in tensors,
        "attention_bias": arch == "llama" and "blk.0.attn_q.bias" in tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in tensors,
        "dtype": _dtype(gguf),
        "bos_token_id": metadata.integer("tokenizer.ggml.bos_token_id"),
        "eos_token_id": _ends(gguf),
    }
    num_experts = metadata.integer(f"{arch}.expert_count") or 0
    if num_experts:
        config["num_experts_per_tok"] = size("expert_used_count")
    if arch == "qwen3moe":
        norm = metadata.flag(f"{arch}.expert_weights_norm")
        inner = size("expert_feed_forward_length")
        config |= {
            "num_experts": num_experts,
            "moe_intermediate_size": inner,
            "intermediate_size": size("feed_forward_length", inner),
            "norm_topk_prob": norm is None or norm,
        }
    else:
        config["intermediate_size"] = size("feed_forward_length")
    window = metadata.integer(f"{arch}.attention.sliding_window") or 0
    has_window = 0 < window < size("context_length")
    if arch == "llama" and num_experts:
        architecture = "MixtralForCausalLM"
        config |= {"model_type": "mixtral", "num_local_experts": num_experts}
    elif arch == "llama" and has_window:
        architecture = "MistralForCausalLM"
        config["model_type"] = "mistral"
    elif has_window:
        raise ConfigError(
            f"{gguf.path} has {arch}.attention.sliding_window = {window}, but a GGUF file of {arch} does not say in "
            "which layers; serve the safetensors of this model."
        )
    if has_window:
        config["sliding_window"] = window
    return config | {"architectures": [architecture]}


def generation_of(gguf: Gguf) -> dict[str, object]:
    """generation_config.json's fields: the sampling that the model's authors recommend."""
    metadata = gguf.metadata
    names = {"temp": "temperature", "top_p": "top_p", "min_p": "min_p", "penalty_repeat": "repetition_penalty"}
    found: dict[str, object] = {
        name: value for key, name in names.items() if (value := metadata.number(f"general.sampling.{key}")) is not None
    }
    if (top_k := metadata.integer("general.sampling.top_k")) is not None:
        found["top_k"] = top_k
    return found


def rope_divisors(gguf: Gguf, head_dim: int) -> tuple[float, ...]:
    """What the rotary frequency of each pair of a head's dimensions is divided by; empty if by nothing. Raises
    CheckpointError."""
    if "rope_freqs.weight" not in gguf.tensors:
        return ()
    divisors = read_vector(gguf.tensors["rope_freqs.weight"])
    if len(divisors) != head_dim // 2 or not all(math.isfinite(value) and value > 0 for value in divisors):
        raise CheckpointError(f"{gguf.path} has a rope_freqs.weight that is not {head_dim // 2} positive numbers.")
    return tuple(divisors)


def _refuse_unlike(gguf: Gguf, arch: str, head_dim: int) -> None:
    """Raises ConfigError for what the architecture may have and our layers have not."""
    metadata = gguf.metadata
    for key in (f"{arch}.attention.value_length", f"{arch}.rope.dimension_count"):
        if (value := metadata.integer(key)) not in (None, 0, head_dim):
            raise ConfigError(f"{gguf.path} has {key} = {value}, but its heads have {head_dim} numbers.")
    for key in (f"{arch}.pooling_type", f"{arch}.expert_shared_count", f"{arch}.rope.scaling.yarn_log_multiplier"):
        if metadata.number(key):
            raise ConfigError(f"{gguf.path} has {key} = {metadata.number(key):g}, which pagewire does not compute.")
    scale = metadata.number(f"{arch}.attention.scale")
    if scale and not math.isclose(scale, head_dim**-0.5, rel_tol=1e-5):
        raise ConfigError(f"{gguf.path} has {arch}.attention.scale = {scale:g}; pagewire computes 1 / √{head_dim}.")
    for tensor in ("rope_factors_long.weight", "rope_factors_short.weight", "blk.0.attn_qkv.weight"):
        if tensor in gguf.tensors:
            raise ConfigError(f"{gguf.path} has {tensor}, which pagewire does not read for {arch}.")


def _rope(gguf: Gguf, arch: str) -> dict[str, object]:
    """`rope_parameters`."""
    metadata = gguf.metadata
    prefix = f"{arch}.rope.scaling."
    kind, factor = metadata.text(f"{prefix}type"), metadata.number(f"{prefix}factor")
    if kind is None and (old := metadata.number(f"{arch}.rope.scale_linear")):
        kind, factor = "linear", old
    if kind not in (None, "none", "linear", "yarn"):  # the factors of longrope are tensors, which are not read
        raise ConfigError(f"{gguf.path} has {kind} position embeddings, which pagewire does not compute.")
    rope: dict[str, object] = {
        "rope_type": "default" if kind in (None, "none") else kind,
        "rope_theta": metadata.number(f"{arch}.rope.freq_base") or 10_000.0,
    }
    if factor:
        rope["factor"] = factor
    if original := metadata.integer(f"{prefix}original_context_length"):
        rope["original_max_position_embeddings"] = original
    for name in ("beta_fast", "beta_slow"):
        if value := metadata.number(f"{prefix}yarn_{name}"):
            rope[name] = value
    if (value := metadata.number(f"{prefix}attn_factor")) or (value := metadata.number(f"{prefix}yarn_attn_factor")):
        # llama.cpp multiplies it by what HF's attention_factor replaces.
        own = 0.1 * math.log(factor) + 1 if kind == "yarn" and factor and factor > 1 else 1.0
        rope["attention_factor"] = value * own
    return rope


def _dtype(gguf: Gguf) -> str:
    """The type of most of the matrices; of quantized ones that of their scales."""
    num_bytes: Counter[str] = Counter()
    for tensor in gguf.tensors.values():
        if len(tensor.shape) > 1:
            num_bytes[tensor.type] += tensor.num_bytes
    if any(kind not in PLAIN for kind in num_bytes):
        return "float16"
    return _DTYPES[num_bytes.most_common(1)[0][0]] if num_bytes else "float32"


def _ends(gguf: Gguf) -> list[int]:
    metadata = gguf.metadata
    named = [metadata.integer(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    tokens, types = metadata.texts("tokenizer.ggml.tokens") or [], metadata.numbers("tokenizer.ggml.token_type") or []
    known = [
        id for id, (token, kind) in enumerate(zip(tokens, types, strict=False)) if kind == _CONTROL and token in _ENDS
    ]
    return [
        id
        for id in dict.fromkeys([*named, *known])
        if id is not None and id < gguf.tensors["token_embd.weight"].shape[0]
    ]
