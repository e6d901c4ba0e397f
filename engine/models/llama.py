"""Llama and Mistral. config.json decides about biases; Mistral's sliding window is in the spec's `windows`."""

import torch

from ...kernels.ops import Ops
from ..checkpoint.spec import ModelSpec
from ..parallel.collectives import Group
from .decoder import Decoder


def build(
    spec: ModelSpec, *, max_len: int, dtype: torch.dtype, device: torch.device, group: Group, ops: Ops
) -> Decoder:
    return Decoder(
        spec,
        qkv_bias=spec.attention_bias,
        out_bias=spec.attention_bias,
        qk_norm=False,
        max_len=max_len,
        dtype=dtype,
        device=device,
        group=group,
        ops=ops,
    )
