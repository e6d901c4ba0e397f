"""Mixtral: Mistral with experts in every layer."""

import torch

from ...kernels.ops import Ops
from ..checkpoint.spec import ModelSpec
from ..parallel.collectives import Group
from .decoder import Decoder, ExpertNames

_EXPERTS = ExpertNames(block="block_sparse_moe", gate="w1", up="w3", down="w2")


def build(
    spec: ModelSpec, *, max_len: int, dtype: torch.dtype, device: torch.device, group: Group, ops: Ops
) -> Decoder:
    return Decoder(
        spec,
        qkv_bias=False,
        out_bias=False,
        qk_norm=False,
        max_len=max_len,
        dtype=dtype,
        device=device,
        group=group,
        ops=ops,
        experts=_EXPERTS,
    )
