"""RMSNorm, alone and fused with the residual addition before it."""

from torch import Tensor, nn

from ...kernels.ops import Ops
from .linear import parameter


class RmsNorm(nn.Module):
    """RMSNorm over the last dimension: of hidden states, or of each head."""

    def __init__(self, size: int, *, eps: float, ops: Ops) -> None:
        super().__init__()
        self.weight = parameter(size)
        self.eps = eps
        self._ops = ops

    def forward(self, x: Tensor) -> Tensor:
        return self._ops.rms_norm(x, self.weight, self.eps)

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """(norm(x + residual), x + residual)."""
        return self._ops.add_rms_norm(x, residual, self.weight, self.eps)
