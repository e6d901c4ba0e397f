"""Qwen3-MoE: Qwen3 with experts in all or some layers."""

import torch

from ...kernels.ops import Ops
from ..checkpoint.spec import ModelSpec
from ..parallel.collectives import Group
from .decoder import Decoder, ExpertNames

_EXPERTS = ExpertNames(block="mlp", gate="gate_proj", up="up_proj", down="down_proj")


def build(
    spec: ModelSpec, *, max_len: int, dtype: torch.dtype, device: torch.device, group: Group, ops: Ops
) -> Decoder:
    return Decoder(
        spec,
        qkv_bias=spec.attention_bias,
        out_bias=spec.attention_bias,
        qk_norm=True,
        max_len=max_len,
        dtype=dtype,
        device=device,
        group=group,
        ops=ops,
        experts=_EXPERTS,
    )
