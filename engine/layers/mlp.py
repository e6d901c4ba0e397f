"""The gated feed-forward part of a decoder layer."""

from torch import Tensor, nn

from ..parallel.collectives import Group
from .linear import GatedLinear, Linear


class GatedMlp(nn.Module):
    """down(silu(gate(x)) · up(x)). x: [tokens, hidden_size]."""

    def __init__(self, hidden_size: int, intermediate_size: int, *, bias: bool, group: Group) -> None:
        super().__init__()
        self.gate_up_proj = GatedLinear(hidden_size, 2 * intermediate_size, bias=bias)
        self.down_proj = Linear(intermediate_size, hidden_size, bias=bias, sum_over=group)

    def forward(self, x: Tensor) -> Tensor:
        down: Tensor = self.down_proj(self.gate_up_proj(x))
        return down
