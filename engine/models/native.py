"""A native decoder whose layers all run in one call of C."""

import ctypes
from typing import cast

import torch
from torch import Tensor

from ...kernels.cpu.dense import PackedMatrix
from ...kernels.cpu.experts import NativeExperts
from ...kernels.cpu.library import Kernels
from ...kernels.cpu.structs import DecoderFields, LayerFields
from ..attention.base import AttentionBackend
from ..attention.native import NativePagedAttention
from ..layers.linear import Linear, Weight
from ..layers.mlp import GatedMlp
from .decoder import Decoder, DecoderLayer


class NativeDecoder:
    """Gives the same bits as the decoder it wraps. The wrapped decoder runs itself if attention is wrapped, because
    then every layer must call it."""

    def __init__(self, decoder: Decoder, kernels: Kernels) -> None:
        self.kv_shape = decoder.kv_shape
        self._decoder = decoder
        self._kernels = kernels
        self._fields: DecoderFields | None = None
        self._is_lacking: bool | None = None  # None: not known yet
        self._layers: ctypes.Array[LayerFields] | None = None
        self._per_token = self._hidden = 0
        self._work = torch.empty(0)

    def logits(self, hidden: Tensor) -> Tensor:
        return self._decoder.logits(hidden)

    def greedy(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        return self._decoder.greedy(hidden)

    def hidden(self, ids: Tensor, positions: Tensor, attention: AttentionBackend) -> Tensor:
        if not isinstance(attention, NativePagedAttention) or self._lacks(attention):
            return self._decoder.hidden(ids, positions, attention)
        if self._fields is None:
            self._fields = self._describe(attention)
        tokens = ids.shape[0]
        if self._work.numel() < tokens * self._per_token:
            self._work = torch.empty(tokens * self._per_token)
        step = attention.step_fields()
        step.ids, step.positions = ids.data_ptr(), positions.data_ptr()
        step.work = self._work.data_ptr()
        out = torch.empty((tokens, self._hidden))
        self._kernels.decoder(ctypes.addressof(self._fields), ctypes.addressof(step), out.data_ptr())
        return out

    def _lacks(self, attention: NativePagedAttention) -> bool:
        """Whether the kernels lack some layer's attention, or its layers have several block tables."""
        if self._is_lacking is None:
            layers = [cast(DecoderLayer, layer).self_attn for layer in self._decoder.model.layers]
            lacking = (attention.lacks(i, part.attention) is not None for i, part in enumerate(layers))
            self._is_lacking = attention.num_tables > 1 or any(lacking)
        return self._is_lacking

    def _describe(self, attention: NativePagedAttention) -> DecoderFields:
        """The addresses of all weights and pages. Called once, when the cache is open."""
        body = self._decoder.model
        layers = [cast(DecoderLayer, layer) for layer in body.layers]
        self._layers, inner = (LayerFields * len(layers))(), 0
        for fields, (index, layer) in zip(self._layers, enumerate(layers), strict=True):
            part, mlp = layer.self_attn, layer.mlp
            fields.qkv, fields.o = _matrix(part.qkv_proj), _matrix(part.o_proj)
            if isinstance(mlp, GatedMlp):
                fields.gate_up, fields.down = _matrix(mlp.gate_up_proj), _matrix(mlp.down_proj)
                inner = max(inner, fields.down.k)
            else:
                experts = cast(NativeExperts, mlp.experts)
                fields.router, fields.experts = _matrix(mlp.gate), ctypes.addressof(experts.fields)
                inner = max(inner, mlp.num_experts + 2 * mlp.top_k)
            fields.input_norm = layer.input_layernorm.weight.data_ptr()
            fields.post_norm = layer.post_attention_layernorm.weight.data_ptr()
            if part.q_norm is not None and part.k_norm is not None:
                fields.q_norm, fields.k_norm = part.q_norm.weight.data_ptr(), part.k_norm.weight.data_ptr()
            fields.pages = attention.pages(index, part.heads, part.attention)
        first, embed = self._layers[0], _matrix(body.embed_tokens)
        cos, sin = self._decoder.rotary_table
        self._hidden = embed.k
        self._per_token = 2 * embed.k + first.qkv.n + first.o.k + inner
        return DecoderFields(
            embed=embed,
            layers=ctypes.addressof(self._layers),
            norm=body.norm.weight.data_ptr(),
            cos=cos.data_ptr(),
            sin=sin.data_ptr(),
            num_layers=len(layers),
            hidden=embed.k,
            eps=body.norm.eps,
        )


def _matrix(module: Weight) -> ctypes.Structure:
    matrix = cast(PackedMatrix, module.matrix)
    return matrix.fields(module.bias if isinstance(module, Linear) else None)
