"""The decoder that all native families share. Its parameters have the checkpoints' names.

A family's module states what differs. `engine.weights` fills in the weights; `fused` tells it which projections of the
checkpoint share a parameter.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from ...kernels.ops import Ops
from ..attention.base import AttentionBackend
from ..attention.kv_cache import KvShape
from ..checkpoint.spec import ModelSpec
from ..layers.attention import Attention
from ..layers.embedding import Vocabulary
from ..layers.linear import Weight
from ..layers.mlp import GatedMlp
from ..layers.moe import MoeMlp
from ..layers.norm import RmsNorm
from ..layers.rotary import RotaryTable
from ..parallel import shard
from ..parallel.collectives import Group


class Model(Protocol):
    """The runner's interface to a model, native or not."""

    kv_shape: KvShape

    def hidden(self, ids: Tensor, positions: Tensor, attention: AttentionBackend) -> Tensor:
        """The forward pass over a step's tokens. ids, positions: [tokens] int64 → [tokens, hidden_size]."""

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden: [positions, hidden_size], any selection of the hidden states → float32 [positions, vocab_size]."""

    def greedy(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """(greatest logit, its id): float32 [positions], int64 [positions]. The greatest is NaN if any logit is NaN."""


class DecoderLayer(nn.Module):
    """Attention and feed-forward, each after a norm and added to the residual stream."""

    def __init__(
        self,
        spec: ModelSpec,
        layer: int,
        *,
        qkv_bias: bool,
        out_bias: bool,
        qk_norm: bool,
        group: Group,
        ops: Ops,
    ) -> None:
        super().__init__()
        self.input_layernorm = RmsNorm(spec.hidden_size, eps=spec.rms_norm_eps, ops=ops)
        self.self_attn = Attention(
            layer=layer,
            hidden_size=spec.hidden_size,
            num_heads=spec.num_heads,
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            window=spec.windows[layer],
            qkv_bias=qkv_bias,
            out_bias=out_bias,
            qk_norm_eps=spec.rms_norm_eps if qk_norm else None,
            group=group,
            ops=ops,
        )
        self.post_attention_layernorm = RmsNorm(spec.hidden_size, eps=spec.rms_norm_eps, ops=ops)
        self.mlp = _feed_forward(spec, layer, group, ops)

    def forward(
        self, x: Tensor, residual: Tensor | None, cos: Tensor, sin: Tensor, attention: AttentionBackend
    ) -> tuple[Tensor, Tensor]:
        """(this layer's output, the residual that is yet to be added to it)."""
        if residual is None:
            x, residual = self.input_layernorm(x), x
        else:
            x, residual = self.input_layernorm.add(x, residual)
        x = self.self_attn(x, cos, sin, attention)
        x, residual = self.post_attention_layernorm.add(x, residual)
        return self.mlp(x), residual


def _feed_forward(spec: ModelSpec, layer: int, group: Group, ops: Ops) -> GatedMlp | MoeMlp:
    moe = spec.moe
    if moe is None or not moe.layers[layer]:
        return GatedMlp(spec.hidden_size, spec.intermediate_size, bias=spec.mlp_bias, group=group)
    return MoeMlp(
        spec.hidden_size,
        moe.intermediate_size,
        num_experts=moe.num_experts,
        top_k=moe.num_experts_per_tok,
        renormalize=moe.norm_topk_prob,
        rounds_weights=moe.rounds_weights,
        group=group,
        ops=ops,
    )


class Body(nn.Module):
    """The model without its head."""

    def __init__(
        self, spec: ModelSpec, *, qkv_bias: bool, out_bias: bool, qk_norm: bool, group: Group, ops: Ops
    ) -> None:
        super().__init__()
        self.embed_tokens = Vocabulary(spec.vocab_size, spec.hidden_size, group=group)
        self.layers = nn.ModuleList(
            DecoderLayer(spec, layer, qkv_bias=qkv_bias, out_bias=out_bias, qk_norm=qk_norm, group=group, ops=ops)
            for layer in range(spec.num_layers)
        )
        self.norm = RmsNorm(spec.hidden_size, eps=spec.rms_norm_eps, ops=ops)

    def forward(self, ids: Tensor, cos: Tensor, sin: Tensor, attention: AttentionBackend) -> Tensor:
        x: Tensor = self.embed_tokens(ids)
        residual: Tensor | None = None
        for layer in self.layers:
            x, residual = layer(x, residual, cos, sin, attention)
        assert residual is not None
        normed, _ = self.norm.add(x, residual)
        return normed


@dataclass(frozen=True)
class ExpertNames:
    """The checkpoint's names of the modules of a mixture of experts."""

    block: str  # our `mlp`
    gate: str  # the next three are modules of an expert
    up: str
    down: str


class Decoder(nn.Module):
    """A decoder-only model. Its parameters have no memory until `registry.allocate` and no values until the loader has
    filled them; it runs once they are packed."""

    def __init__(
        self,
        spec: ModelSpec,
        *,
        qkv_bias: bool,
        out_bias: bool,
        qk_norm: bool,
        max_len: int,
        dtype: torch.dtype,
        device: torch.device,
        group: Group,
        ops: Ops,
        experts: ExpertNames | None = None,
    ) -> None:
        """spec: of the whole model. group: the ranks that share the model. experts: required if the spec has
        experts."""
        super().__init__()
        self.group, self.max_len = group, max_len
        self.cuts = shard.cuts(spec, group.rank, group.size) if group.size > 1 else {}
        spec = shard.local(spec, group.rank, group.size)
        self.model = Body(spec, qkv_bias=qkv_bias, out_bias=out_bias, qk_norm=qk_norm, group=group, ops=ops)
        tied = spec.tie_word_embeddings
        self.lm_head = None if tied else Vocabulary(spec.vocab_size, spec.hidden_size, group=group)
        self.kv_shape = KvShape.uniform(
            num_layers=spec.num_layers, kv_heads=spec.num_kv_heads, head_dim=spec.head_dim, dtype=dtype
        )
        # For `engine.weights.mapping`: fused module → the checkpoint's modules and their rows.
        self.fused: dict[str, tuple[tuple[str, int], ...]] = {
            "qkv_proj": (
                ("q_proj", spec.num_heads * spec.head_dim),
                ("k_proj", spec.num_kv_heads * spec.head_dim),
                ("v_proj", spec.num_kv_heads * spec.head_dim),
            ),
            "gate_up_proj": (("gate_proj", spec.intermediate_size), ("up_proj", spec.intermediate_size)),
        }
        self.renamed: dict[str, str] = {}  # our module → the checkpoint's name, where they differ
        if spec.moe is not None:
            assert experts is not None, f"{spec.architecture} has no ExpertNames"
            numbers, rows = range(spec.moe.num_experts), spec.moe.intermediate_size
            self.renamed["mlp"] = experts.block
            self.fused["gate_up"] = tuple(
                (f"experts.{i}.{name}", rows) for i in numbers for name in (experts.gate, experts.up)
            )
            self.fused["down"] = tuple((f"experts.{i}.{experts.down}", spec.hidden_size) for i in numbers)
        # Tensors that may be present and are not read: a copy of the embedding as the head.
        self.redundant = ("lm_head.weight",) if tied else ()
        self.num_heads, self.intermediate_size = spec.num_heads, spec.intermediate_size  # of this rank
        self.rope = spec.rope
        self._rotary = RotaryTable(self.rope, dim=spec.head_dim, max_len=max_len, dtype=dtype, device=device)

    @property
    def rotary_table(self) -> tuple[Tensor, Tensor]:
        """cos, sin of all positions: each [max_len, 1, dim]."""
        return self._rotary.tables

    def pack(self, ops: Ops) -> int:
        """Passes the loaded weights to the kernels; once, before the first forward pass. Returns the bytes of all
        parameters after that."""
        for module in self.modules():
            if isinstance(module, Weight | MoeMlp):
                module.pack(ops)
        return self.num_bytes

    @property
    def num_bytes(self) -> int:
        """Bytes of the packed matrices and of the other parameters."""
        modules = [module for module in self.modules() if isinstance(module, Weight | MoeMlp)]
        weights = sum(matrix.nbytes for module in modules for matrix in module.matrices)
        return weights + sum(parameter.nbytes for parameter in self.parameters())

    def hidden(self, ids: Tensor, positions: Tensor, attention: AttentionBackend) -> Tensor:
        cos, sin = self._rotary.at(positions)
        hidden: Tensor = self.model(ids, cos, sin, attention)
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        return self._head.logits(hidden)

    def greedy(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        return self._head.greedy(hidden)

    @property
    def vocabularies(self) -> tuple[Vocabulary, ...]:
        """The embedding, and the head if it is a matrix of its own."""
        return (self.model.embed_tokens,) if self.lm_head is None else (self.model.embed_tokens, self.lm_head)

    @property
    def _head(self) -> Vocabulary:
        return self.model.embed_tokens if self.lm_head is None else self.lm_head
