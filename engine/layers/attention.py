"""The attention part of a decoder layer: projections, optional norms of the heads, rotary embedding, paged
attention."""

from torch import Tensor, nn

from ...kernels.ops import Ops
from ..attention.base import AttentionBackend, AttentionParameters
from ..parallel.collectives import Group
from .linear import Linear
from .norm import RmsNorm


class Attention(nn.Module):
    """Grouped-query attention over this rank's heads. qk_norm_eps: of the norms of queries and keys (Qwen3); None: no
    norms."""

    def __init__(
        self,
        *,
        layer: int,
        hidden_size: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        window: int | None,
        qkv_bias: bool,
        out_bias: bool,
        qk_norm_eps: float | None,
        group: Group,
        ops: Ops,
    ) -> None:
        super().__init__()
        self._layer = layer
        self.heads = num_heads
        self._kv_heads = num_kv_heads
        self._dim = head_dim
        self.attention = AttentionParameters(scale=head_dim**-0.5, window=window)
        self._ops = ops
        self.eps = qk_norm_eps or 0.0
        self.qkv_proj = Linear(hidden_size, (num_heads + 2 * num_kv_heads) * head_dim, bias=qkv_bias)
        self.o_proj = Linear(num_heads * head_dim, hidden_size, bias=out_bias, sum_over=group)
        self.q_norm = RmsNorm(head_dim, eps=qk_norm_eps, ops=ops) if qk_norm_eps is not None else None
        self.k_norm = RmsNorm(head_dim, eps=qk_norm_eps, ops=ops) if qk_norm_eps is not None else None

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, attention: AttentionBackend) -> Tensor:
        """x: [tokens, hidden_size]; cos, sin: from `RotaryTable.at`."""
        heads, kv_heads = self.heads, self._kv_heads
        states = self.qkv_proj(x).view(-1, heads + 2 * kv_heads, self._dim)
        q_norm = None if self.q_norm is None else self.q_norm.weight
        k_norm = None if self.k_norm is None else self.k_norm.weight
        turned = self._ops.norm_rotary(states[:, : heads + kv_heads], heads, q_norm, k_norm, self.eps, cos, sin)
        result = attention.forward(
            self._layer,
            turned[:, :heads],
            turned[:, heads:],
            states[:, heads + kv_heads :],
            self.attention,
        )
        out: Tensor = self.o_proj(result.view(x.shape[0], -1))
        return out
