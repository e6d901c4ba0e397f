"""Converts a checkpoint of `tools.make_checkpoint` to a GGUF file, in bfloat16 or as llama.cpp quantizes it.

llama.cpp's converter recognises tokenizers by a fingerprint and refuses generated ones, so this module writes the file
with the `gguf` package. It supports the architectures llama and qwen3.
"""

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .base import CONVERT_TIMEOUT_S, PeerError
from .in_child import has_modules

_QUANTIZED = "Q4_K_M"

_NAMES = {  # of a layer's tensors, transformers' → GGUF's
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_NORMAL, _CONTROL = 1, 3  # llama.cpp's token types


def gguf_name(name: str) -> str:
    """`model.layers.3.mlp.up_proj.weight` → `blk.3.ffn_up.weight`. Raises PeerError for an unknown name."""
    outside = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}
    if name in outside:
        return outside[name]
    number, _, rest = name.removeprefix("model.layers.").partition(".")
    known = _NAMES.get(rest.removesuffix(".weight"))
    if known is None or not number.isdigit():
        raise PeerError(f"no GGUF name is known for {name}")
    return f"blk.{number}.{known}.weight"


@dataclass(frozen=True)
class GgufFile:
    """The checkpoint in bfloat16, or in Q4_K_M."""

    quantized_by: str | None = None  # a program of llama.cpp beside which llama-quantize lies

    def missing(self) -> str:
        """How to install what is needed; empty if nothing is."""
        if not has_modules(sys.executable, "gguf"):
            return "pip install gguf"
        return "" if self.quantized_by is None or self._quantize() else "build llama.cpp's target llama-quantize"

    def convert(self, folder: Path) -> Path:
        """The file in the checkpoint's folder, written unless it exists. Raises PeerError."""
        plain = _convert(folder)
        target = folder / f"model-{_QUANTIZED}.gguf"
        if self.quantized_by is None or target.exists():
            return plain if self.quantized_by is None else target
        unfinished = target.with_suffix(".unfinished")
        command = [self._quantize() or "llama-quantize", str(plain), str(unfinished), _QUANTIZED]
        try:
            subprocess.run(command, check=True, capture_output=True, timeout=CONVERT_TIMEOUT_S)
        except (OSError, subprocess.SubprocessError) as error:
            raise PeerError(f"{plain} could not be quantized: {error}") from None
        os.replace(unfinished, target)
        return target

    def _quantize(self) -> str | None:
        beside = None if self.quantized_by is None else shutil.which(self.quantized_by)
        return None if beside is None else shutil.which(str(Path(beside).with_name("llama-quantize")))


def _convert(folder: Path) -> Path:
    """Writes `model.gguf` into the checkpoint's folder unless it exists. Raises PeerError."""
    target = folder / "model.gguf"
    if target.exists():
        return target
    import gguf

    config = json.loads((folder / "config.json").read_text())
    kind = config["model_type"]
    if kind not in ("llama", "qwen3"):
        raise PeerError(f"{kind} models cannot be written as GGUF, only llama and qwen3")
    unfinished = target.with_suffix(".unfinished")
    writer: Any = gguf.GGUFWriter(unfinished, kind)
    heads, kv_heads, head_dim = (config[key] for key in ("num_attention_heads", "num_key_value_heads", "head_dim"))
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    _add_tokenizer(writer, folder, config)
    # llama.cpp's rotary embedding for llama rotates neighbouring pairs, transformers' halves; qwen3's is the same.
    turned = {".q_proj.weight": heads, ".k_proj.weight": kv_heads} if kind == "llama" else {}
    _add_tensors(writer, gguf, folder / "model.safetensors", turned)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    os.replace(unfinished, target)
    return target


def _add_tokenizer(writer: Any, folder: Path, config: dict[str, Any]) -> None:
    entries = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
    tokens = sorted(entries, key=entries.__getitem__)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens)
    writer.add_token_types([_CONTROL if token in ("<pad>", "<s>", "</s>") else _NORMAL for token in tokens])
    # llama.cpp requires a list; prompts are ids, so no merge is ever applied
    writer.add_token_merges([next(f"{t[:-1]} {t[-1]}" for t in tokens if t[:-1] in entries and t[-1] in entries)])
    writer.add_bos_token_id(config["bos_token_id"])
    writer.add_eos_token_id(config["eos_token_id"])
    writer.add_pad_token_id(config["pad_token_id"])
    writer.add_add_bos_token(False)


def _add_tensors(writer: Any, gguf: Any, file: Path, turned: dict[str, int]) -> None:
    """Adds matrices as they are and vectors in float32. `turned`: end of a name → number of heads; their rows are
    reordered."""
    import numpy as np

    with file.open("rb") as source:
        size = int.from_bytes(source.read(8), "little")
        header = json.loads(source.read(size))
    data = np.memmap(file, dtype=np.uint8, mode="r", offset=8 + size)
    for name, about in header.items():
        if name == "__metadata__":
            continue
        if about["dtype"] != "BF16":
            raise PeerError(f"{name} is {about['dtype']}; only bfloat16 is written as GGUF")
        start, end = about["data_offsets"]
        tensor = data[start:end].view(np.uint16).reshape(about["shape"])
        if tensor.ndim == 1:
            writer.add_tensor(gguf_name(name), (tensor.astype(np.uint32) << 16).view(np.float32))
            continue
        for ending, heads in turned.items():
            if name.endswith(ending):
                halves = tensor.reshape(heads, 2, tensor.shape[0] // heads // 2, tensor.shape[1])
                tensor = np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(tensor.shape)
        writer.add_tensor(gguf_name(name), tensor.view(np.uint8), raw_dtype=gguf.GGMLQuantizationType.BF16)
