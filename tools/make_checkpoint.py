"""Writes a checkpoint of a well-known size without a download: a config, a tokenizer and optionally random weights.

    python -m pagewire.tools.make_checkpoint FOLDER --like qwen3-0.6b
    pagewire serve FOLDER --load-format dummy

Benchmarks do the same work with it as with the real model; its output is meaningless. The tokenizer encodes single
bytes and decodes every id to a short word, so outputs are about as long as a real model's.
"""

import argparse
import json
from itertools import product
from pathlib import Path
from string import ascii_lowercase

_QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 1_000_000.0,
    "attention_bias": False,
    "tie_word_embeddings": True,
}
_QWEN3_MOE = {
    **_QWEN3,
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "norm_topk_prob": True,
    "tie_word_embeddings": False,
}
_LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 10_000.0,
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": True,
}
SHAPES: dict[str, dict[str, object]] = {
    "qwen3-0.6b": {
        **_QWEN3,
        "vocab_size": 151_936,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 40_960,
    },
    "qwen3.5-0.8b": {
        "architectures": ["Qwen3_5ForCausalLM"],
        "model_type": "qwen3_5_text",
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "attention_bias": False,
        "tie_word_embeddings": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000_000.0, "partial_rotary_factor": 0.25},
        "vocab_size": 248_320,
        "hidden_size": 1024,
        "intermediate_size": 3584,
        "num_hidden_layers": 24,
        "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"] * 6,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "linear_conv_kernel_dim": 4,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 16,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "max_position_embeddings": 40_960,
    },
    "qwen3-30b-a3b": {
        **_QWEN3_MOE,
        "vocab_size": 151_936,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "max_position_embeddings": 40_960,
    },
    "llama-15m": {
        **_LLAMA,
        "vocab_size": 32_000,
        "hidden_size": 288,
        "intermediate_size": 768,
        "num_hidden_layers": 6,
        "num_attention_heads": 6,
        "num_key_value_heads": 6,
        "head_dim": 48,
        "max_position_embeddings": 2048,
    },
    "llama-3.1-8b": {
        **_LLAMA,
        "vocab_size": 128_256,
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 131_072,
        "rope_theta": 500_000.0,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
        "tie_word_embeddings": False,
    },
    "qwen3-tiny": {  # for trying out a program: Triton's interpreter takes a second for one step
        **_QWEN3,
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 1024,
    },
}
"""Name → config.json without the ids of special tokens."""

_SPECIAL = ("<pad>", "<s>", "</s>")
_CHAT_TEMPLATE = (
    "{% for message in messages %}<s>{{ message.role }}\n{{ message.content }}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant\n{% endif %}"
)


def write_tokenizer(folder: Path, vocab_size: int) -> None:
    """Special tokens, the 256 bytes, and made-up words up to `vocab_size` entries. There are no merges, so text is
    encoded byte by byte; send prompts of exact lengths as ids."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = ("Ġ" + "".join(word) for length in (2, 3, 4) for word in product(ascii_lowercase, repeat=length))
    entries = [*_SPECIAL, *letters]
    entries += [word for word, _ in zip(words, range(vocab_size - len(entries)), strict=False)]
    tokenizer = Tokenizer(models.BPE(vocab={entry: i for i, entry in enumerate(entries)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(entry, special=True) for entry in _SPECIAL])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "pad_token": "<pad>",
        "chat_template": _CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def write_weights(folder: Path) -> None:
    """Writes model.safetensors in bfloat16, with the tensor names of the Hub's checkpoints."""
    import torch
    from safetensors.torch import save_file
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.core_model_loading import revert_weight_conversion

    from ..engine.weights.dummy import Dummy

    config = AutoConfig.from_pretrained(folder)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)  # type: ignore[no-untyped-call]
    model = model.to_empty(device="cpu")
    model.tie_weights()
    tensors = dict(model.named_parameters())  # tied parameters occur once
    dummy = Dummy()
    with torch.no_grad():
        for name, tensor in tensors.items():
            dummy.fill(name, tensor, is_vector=tensor.dim() < 2)
    tensors = revert_weight_conversion(model, tensors)  # transformers stacks experts
    save_file({name: tensor.detach().contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")


def make_checkpoint(folder: Path, like: str, *, weights: bool) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    shape = SHAPES[like]
    config = {**shape, "dtype": "bfloat16", "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    assert isinstance(shape["vocab_size"], int)
    write_tokenizer(folder, shape["vocab_size"])
    if weights:
        write_weights(folder)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="folder to write to")
    parser.add_argument("--like", choices=SHAPES, default="qwen3-0.6b", help="model size (default: %(default)s)")
    parser.add_argument("--weights", action="store_true", help="also write random weights, which other engines need")
    arguments = parser.parse_args(argv)
    make_checkpoint(arguments.folder, arguments.like, weights=arguments.weights)
    print(f"{arguments.folder}: {arguments.like}; try: pagewire serve {arguments.folder} --load-format dummy")


if __name__ == "__main__":
    main()
