"""Writes GGUF files with the `gguf` package, from the tiny checkpoints of `checkpoints.py`.

Names, types and metadata are the package's; the order of Llama's rows is that of llama.cpp's converter.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file

Array = NDArray[Any]

_ARCHITECTURES = {
    "llama": gguf.MODEL_ARCH.LLAMA,
    "mistral": gguf.MODEL_ARCH.LLAMA,
    "mixtral": gguf.MODEL_ARCH.LLAMA,
    "qwen2": gguf.MODEL_ARCH.QWEN2,
    "qwen3": gguf.MODEL_ARCH.QWEN3,
    "qwen3_moe": gguf.MODEL_ARCH.QWEN3MOE,
}

# Types that the package does not quantize to: where a block has its scales (float16), and how large they are so that
# random blocks are weights about as wide as those of `checkpoints.py`.
_RANDOM = {
    "Q2_K": {80: 0.03, 82: 0.045},
    "Q3_K": {108: 0.006},
    "Q4_K": {0: 0.0016, 2: 0.012},
    "Q5_K": {0: 0.0008, 2: 0.0124},
    "Q6_K": {208: 0.0002},
}
QUANTIZED = ["Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", *_RANDOM]
QUANTIZED_SIZES = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64, "num_hidden_layers": 2}
"""Changes for `make_checkpoint`: the K types have blocks of 256 columns."""


def random_blocks(kind: str, shape: tuple[int, ...], seed: int = 0) -> Array:
    """Bytes of a matrix of this type: uint8 [..., bytes of a row]."""
    values, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    rng = np.random.default_rng(seed)
    blocks = rng.integers(0, 256, (*shape[:-1], shape[-1] // values, size), dtype=np.uint8)
    for place, scale in _RANDOM[kind].items():
        scales = (scale * rng.uniform(0.5, 1.5, (*blocks.shape[:-1], 1))).astype(np.float16)
        blocks[..., place : place + 2] = scales.view(np.uint8)
    return blocks.reshape(*shape[:-1], -1)


def encode(tensor: Array, kind: str, seed: int = 0) -> Array:
    """The bytes of a float32 tensor in this type; of those in `_RANDOM` any bytes."""
    if kind in _RANDOM:
        return random_blocks(kind, tensor.shape, seed)
    return np.asarray(gguf.quantize(tensor, gguf.GGMLQuantizationType[kind]))


def write_gguf(
    folder: Path,
    path: Path,
    kind: str = "F32",
    *,
    types: Mapping[str, str] | None = None,
    metadata: Mapping[str, int | float | bool | str | list[str]] | None = None,
    more: Mapping[str, Array] | None = None,
    split: int = 0,
    widened: Path | None = None,
) -> Path:
    """Writes the checkpoint in `folder` with matrices of the type `kind`, and vectors and routers in F32.

    types: end of a tensor's name → another type. metadata: more entries, or other values. more: more tensors. split:
    tensors in a file, of several.
    widened: a folder for the checkpoint that holds the same weights in float32. Returns the first file.
    """
    config = json.loads((folder / "config.json").read_text())
    arch = _ARCHITECTURES[config["model_type"]]
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[arch], split_max_tensors=split)
    tensors = {name: tensor.float().numpy() for name, tensor in load_file(folder / "model.safetensors").items()}
    if config["tie_word_embeddings"]:
        tensors.pop("lm_head.weight", None)
    add_config(writer, folder)
    if (folder / "tokenizer.json").exists():
        add_tokenizer(writer, folder)
    else:
        writer.add_bos_token_id(config["bos_token_id"])
        writer.add_eos_token_id(config["eos_token_id"])
    for key, value in (metadata or {}).items():
        writer.kv_data[0].pop(key, None)  # the package refuses a second value
        writer.add_key_value(key, value, gguf.GGUFValueType.get_type(value))
    if (config.get("rope_parameters") or {}).get("rope_type") == "llama3":
        writer.add_tensor("rope_freqs.weight", _llama3_divisors(config))
    for name, tensor in (more or {}).items():
        writer.add_tensor(name, tensor)
    names = gguf.get_tensor_name_map(arch, config["num_hidden_layers"])
    for seed, (name, (tensor, sources)) in enumerate(_stacked(tensors, config).items()):
        found = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert found is not None, name
        is_matrix = tensor.ndim > 1 and "gate_inp" not in found
        own = next((other for end, other in (types or {}).items() if name.endswith(end)), kind) if is_matrix else "F32"
        heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
        turned = heads.get(name.split(".")[-2]) if arch == gguf.MODEL_ARCH.LLAMA else None
        data = encode(tensor if turned is None else _permuted(tensor, turned), own, seed)
        writer.add_tensor(found, data, raw_dtype=gguf.GGMLQuantizationType[own])
        wide = gguf.dequantize(data, gguf.GGMLQuantizationType[own]).reshape(tensor.shape)
        wide = wide if turned is None else _restored(wide, turned)
        tensors |= dict(zip(sources, wide, strict=True)) if len(sources) > 1 else {sources[0]: wide}
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    if widened is not None:
        widened.mkdir(exist_ok=True)
        (widened / "config.json").write_text(json.dumps({**config, "dtype": "float32"}))
        wide_tensors = {name: torch.from_numpy(np.ascontiguousarray(tensor)) for name, tensor in tensors.items()}
        save_file(wide_tensors, widened / "model.safetensors", metadata={"format": "pt"})
    return path if not split else next(iter(sorted(path.parent.glob(f"{path.stem}-00001-of-*.gguf"))))


def add_config(writer: Any, folder: Path) -> None:
    """What config.json says."""
    config = json.loads((folder / "config.json").read_text())
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    if head_dim := config.get("head_dim"):
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
        writer.add_rope_dimension_count(head_dim)
    rope = config["rope_parameters"]
    writer.add_rope_freq_base(rope["rope_theta"])
    if rope["rope_type"] in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(rope["factor"])
        if rope["rope_type"] == "yarn":
            writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    if config["model_type"] in ("mistral", "mixtral") and config.get("sliding_window"):
        writer.add_sliding_window(config["sliding_window"])
    if experts := config.get("num_local_experts") or config.get("num_experts"):
        writer.add_expert_count(experts)
        writer.add_expert_used_count(config["num_experts_per_tok"])
        if inner := config.get("moe_intermediate_size"):
            writer.add_expert_feed_forward_length(inner)


def add_tokenizer(writer: Any, folder: Path, *, pre: str = "gpt-2") -> None:
    """The vocabulary of tokenizer.json and the named tokens of tokenizer_config.json, as llama.cpp's converter does."""
    described = json.loads((folder / "tokenizer.json").read_text())
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    add_vocabulary(writer, described, pre=pre)
    ids = described["model"]["vocab"] | {token["content"]: token["id"] for token in described["added_tokens"]}
    for name, add in (
        ("bos_token", writer.add_bos_token_id),
        ("eos_token", writer.add_eos_token_id),
        ("pad_token", writer.add_pad_token_id),
        ("unk_token", writer.add_unk_token_id),
    ):
        if settings.get(name) in ids:
            add(ids[settings[name]])
    processor = json.dumps(described.get("post_processor"))
    writer.add_add_bos_token("bos_token" in settings and json.dumps(settings["bos_token"]) in processor)
    if template := settings.get("chat_template"):
        writer.add_chat_template(template)


def add_vocabulary(
    writer: Any, described: dict[str, Any], *, pre: str, scores: Mapping[str, float] | None = None
) -> None:
    """described: tokenizer.json of a BPE. pre: how it splits words. scores: of a SentencePiece vocabulary."""
    vocab, added = described["model"]["vocab"], {token["content"]: token for token in described["added_tokens"]}
    texts = {id: text for text, id in vocab.items()} | {token["id"]: text for text, token in added.items()}
    tokens, types = [], []
    for id in range(max(texts) + 1):
        text = texts.get(id)
        kind = gguf.TokenType.NORMAL
        if text is None:
            text, kind = f"[PAD{id}]", gguf.TokenType.UNUSED
        elif scores is not None and text == described["model"]["unk_token"]:
            kind = gguf.TokenType.UNKNOWN
        elif text in added:
            kind = gguf.TokenType.CONTROL if added[text]["special"] else gguf.TokenType.USER_DEFINED
        elif scores is not None and len(text) == 6 and text.startswith("<0x"):
            kind = gguf.TokenType.BYTE
        tokens.append(text)
        types.append(kind)
    writer.add_tokenizer_model("gpt2" if scores is None else "llama")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    if scores is not None:
        writer.add_token_scores([scores.get(token, 0.0) for token in tokens])
    elif described["model"]["merges"]:
        writer.add_token_merges([" ".join(merge) for merge in described["model"]["merges"]])


def _stacked(tensors: Mapping[str, Array], config: dict[str, Any]) -> dict[str, tuple[Array, list[str]]]:
    """Name → tensor and the checkpoint's tensors in it: experts are stacked, all others are themselves."""
    found: dict[str, tuple[Array, list[str]]] = {}
    num = config.get("num_local_experts") or config.get("num_experts") or 0
    for name, tensor in tensors.items():
        head, is_expert, tail = name.partition(".experts.")
        if not is_expert:
            found[name] = tensor, [name]
        elif tail.startswith("0."):
            sources = [f"{head}.experts.{i}.{tail[2:]}" for i in range(num)]
            found[f"{head}.experts.{tail[2:]}"] = np.stack([tensors[each] for each in sources]), sources
    return found


def _permuted(tensor: Array, heads: int) -> Array:
    """`LlamaModel.permute` of llama.cpp's converter."""
    halves = tensor.reshape(heads, 2, tensor.shape[0] // heads // 2, *tensor.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(tensor.shape)


def _restored(tensor: Array, heads: int) -> Array:
    pairs = tensor.reshape(heads, tensor.shape[0] // heads // 2, 2, *tensor.shape[1:])
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(tensor.shape)


def _llama3_divisors(config: dict[str, Any]) -> Array:
    """`rope_freqs.weight` as llama.cpp's converter computes it."""
    rope = config["rope_parameters"]
    dim = config["head_dim"]
    frequencies = 1.0 / (rope["rope_theta"] ** (np.arange(0, dim, 2, dtype=np.float32) / dim))
    length = rope["original_max_position_embeddings"]
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    divisors = []
    for wavelength in 2 * np.pi / frequencies:
        if wavelength < length / high:
            divisors.append(1.0)
        elif wavelength > length / low:
            divisors.append(rope["factor"])
        else:
            smooth = (length / wavelength - low) / (high - low)
            divisors.append(1 / ((1 - smooth) / rope["factor"] + smooth))
    return np.array(divisors, np.float32)
