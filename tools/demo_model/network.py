"""The Llama network of the demo model, written for training on a CPU.

Plain tensors in and out, so that it compiles to one graph; the names of the
parameters are those of `LlamaForCausalLM` below `model.`. Owns the writing and
reading of weights and configuration, also for the hybrid network.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional


@dataclass(frozen=True)
class Shape:
    """Sizes of the network; the defaults give about two million parameters."""

    vocabulary: int = 768
    hidden: int = 192
    layers: int = 4
    query_heads: int = 4
    key_heads: int = 2
    head: int = 64
    intermediate: int = 512
    context: int = 8192
    rope_theta: float = 10000.0
    norm_epsilon: float = 1e-5

    @property
    def rotary(self) -> int:
        """The features of a head that rotary positions turn."""
        return self.head

    def make_layer(self, index: int) -> nn.Module:
        return Layer(self)

    def make_norm(self) -> nn.Module:
        return Norm(self)

    def settings(self) -> dict[str, object]:
        """What config.json says beside the sizes that all architectures name alike."""
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "rope_theta": self.rope_theta,
            "mlp_bias": False,
        }


class Norm(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(shape.hidden))
        self.epsilon = shape.norm_epsilon

    def forward(self, x: Tensor) -> Tensor:
        return functional.rms_norm(x, (x.shape[-1],), self.weight, self.epsilon)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of [rows, heads, tokens, head] by [rows, 1, tokens, head]."""
    half = x.shape[-1] // 2
    return x * cos + torch.cat((-x[..., half:], x[..., :half]), -1) * sin


class Attention(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        queries, keys = shape.query_heads * shape.head, shape.key_heads * shape.head
        self.q_proj = nn.Linear(shape.hidden, queries, bias=False)
        self.k_proj = nn.Linear(shape.hidden, keys, bias=False)
        self.v_proj = nn.Linear(shape.hidden, keys, bias=False)
        self.o_proj = nn.Linear(queries, shape.hidden, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        rows, tokens, _ = x.shape
        shape = self.shape
        group = shape.query_heads // shape.key_heads
        q = self.q_proj(x).view(rows, tokens, shape.query_heads, shape.head).transpose(1, 2)
        k = self.k_proj(x).view(rows, tokens, shape.key_heads, shape.head).transpose(1, 2)
        v = self.v_proj(x).view(rows, tokens, shape.key_heads, shape.head).transpose(1, 2)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        out = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        mixed: Tensor = self.o_proj(out.transpose(1, 2).reshape(rows, tokens, -1))
        return mixed


class FeedForward(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden, shape.intermediate, bias=False)
        self.up_proj = nn.Linear(shape.hidden, shape.intermediate, bias=False)
        self.down_proj = nn.Linear(shape.intermediate, shape.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Layer(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.self_attn = Attention(shape)
        self.mlp = FeedForward(shape)
        self.input_layernorm = Norm(shape)
        self.post_attention_layernorm = Norm(shape)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class Network(nn.Module):
    """Token ids to hidden states; the output matrix is the embedding (tied)."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocabulary, shape.hidden)
        self.layers = nn.ModuleList(map(shape.make_layer, range(shape.layers)))
        self.norm = shape.make_norm()
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                std = 0.02 if "embed" in name else 0.7 / math.sqrt(parameter.shape[1])
                nn.init.normal_(parameter, std=std)

    def forward(self, ids: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """[rows, tokens] int64 to [rows, tokens, hidden] float32."""
        x = self.embed_tokens(ids)
        for layer in self.layers:
            x = layer(x, cos, sin)
        out: Tensor = self.norm(x)
        return out


def rotary_table(shape: Shape) -> tuple[Tensor, Tensor]:
    """Cosines and sines, each [context, rotary] float32."""
    powers = torch.arange(0, shape.rotary, 2, dtype=torch.float32) / shape.rotary
    angles = torch.arange(shape.context)[:, None] / shape.rope_theta**powers
    angles = torch.cat((angles, angles), -1)
    return angles.cos(), angles.sin()


def save_network(network: Network, shape: Shape, folder: Path, eos: int, pad: int) -> None:
    """Weights in bfloat16 and the configuration, in the Hugging Face layout."""
    weights = {
        f"model.{name}": parameter.detach().to(torch.bfloat16).contiguous()
        for name, parameter in network.named_parameters()
    }
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)
    settings = shape.settings() | {
        "vocab_size": shape.vocabulary,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.query_heads,
        "num_key_value_heads": shape.key_heads,
        "head_dim": shape.head,
        "hidden_act": "silu",
        "max_position_embeddings": shape.context,
        "rms_norm_eps": shape.norm_epsilon,
        "tie_word_embeddings": True,
        "attention_bias": False,
        "bos_token_id": None,
        "eos_token_id": eos,
        "pad_token_id": pad,
        "dtype": "bfloat16",
        "torch_dtype": "bfloat16",
    }
    (folder / "config.json").write_text(json.dumps(settings, indent=2) + "\n")
    generation = {"eos_token_id": eos, "pad_token_id": pad, "do_sample": False}
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")


def load_weights(network: Network, folder: Path) -> None:
    """Start from the weights of a folder written by `save_network`."""
    weights = load_file(folder / "model.safetensors")
    network.load_state_dict({name.removeprefix("model."): tensor.float() for name, tensor in weights.items()})
