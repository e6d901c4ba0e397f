"""Qwen2 and Qwen2.5: QKV projections always have biases, the output projection never."""

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
        qkv_bias=True,
        out_bias=False,
        qk_norm=False,
        max_len=max_len,
        dtype=dtype,
        device=device,
        group=group,
        ops=ops,
    )
