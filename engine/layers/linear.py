"""Matrix products. Several projections of one input are fused into one product, their rows one below the other."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def parameter(*size: int) -> nn.Parameter:
    """Without values. Models are laid out on the meta device and get their memory from `to_empty`."""
    return nn.Parameter(torch.empty(size), requires_grad=False)


class Linear(nn.Module):
    """x · weightᵀ + bias. x: [tokens, in_size] → [tokens, out_size]."""

    def __init__(self, in_size: int, out_size: int, *, bias: bool) -> None:
        super().__init__()
        self.weight = parameter(out_size, in_size)
        self.bias = parameter(out_size) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)
