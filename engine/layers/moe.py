"""The feed-forward part of a mixture of experts: each token goes through the few experts that its router chooses."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from ...kernels import reference
from ...kernels.ops import Matrix, Ops
from ..parallel.collectives import Group
from .linear import Linear, parameter


class Router(Linear):
    """Scores of the experts. It is small and decides the choice, so it keeps the precision it was loaded with."""

    def layout(self, ops: Ops) -> Callable[[Tensor], Matrix]:
        return ops.router


class MoeMlp(nn.Module):
    """The sum over a token's experts of weight · down(silu(gate(x)) · up(x)). x: [tokens, hidden_size].

    Every rank has the router and a part of each expert, cut like `GatedMlp`. Until `pack` the matrices of all experts
    are stacked: `gate_up` [experts, 2 · intermediate_size, hidden_size], the gates first, and `down` [experts,
    hidden_size, intermediate_size].
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        *,
        num_experts: int,
        top_k: int,
        renormalize: bool,
        rounds_weights: bool,
        group: Group,
    ) -> None:
        """intermediate_size: of each expert. top_k, renormalize: as in `reference.route`. rounds_weights: its weights
        are rounded to the type of x."""
        super().__init__()
        self.gate = Router(hidden_size, num_experts, bias=False)
        self.gate_up: nn.Parameter | None = parameter(num_experts, 2 * intermediate_size, hidden_size)
        self.down: nn.Parameter | None = parameter(num_experts, hidden_size, intermediate_size)
        self.num_experts = num_experts
        self.top_k = top_k
        self.renormalize = renormalize
        self._rounds_weights = rounds_weights
        self._experts: list[tuple[Matrix, Matrix]] = []  # gate_up and down of each
        self._group = group

    @property
    def matrices(self) -> tuple[Matrix, ...]:
        """As in `Weight`: gate_up and down of each expert in turn."""
        return tuple(matrix for expert in self._experts for matrix in expert)

    @matrices.setter
    def matrices(self, matrices: tuple[Matrix, ...]) -> None:
        self.gate_up = self.down = None
        self._experts = list(zip(matrices[::2], matrices[1::2], strict=True))

    def pack(self, ops: Ops) -> None:
        """Packs the experts' weights for the kernels; the router packs itself. Two copies exist for a moment."""
        self._experts = [(ops.gated(gate_up), ops.matrix(down)) for gate_up, down in zip(*self.take(), strict=True)]

    def take(self) -> tuple[Tensor, Tensor]:
        """The stacks; the module gives them up."""
        assert self.gate_up is not None and self.down is not None, "taken twice"
        stacks = self.gate_up.data, self.down.data
        self.gate_up = self.down = None
        return stacks

    def forward(self, x: Tensor) -> Tensor:
        assert self._experts, "used before `pack`"
        weights, experts = reference.route(self.gate(x), self.top_k, self.renormalize)
        if self._rounds_weights:
            weights = weights.to(x.dtype)
        # A token and one of its experts are an assignment; `order` sorts the assignments by expert.
        order = experts.view(-1).argsort()
        counts = experts.view(-1).bincount(minlength=self.num_experts).tolist()
        states = x.index_select(0, order // self.top_k)
        first = 0
        for (gate_up, down), count in zip(self._experts, counts, strict=True):
            if count:
                rows = states[first : first + count]
                rows.copy_(down.product(gate_up.silu_mul(rows, None), None))
                first += count
        parts = torch.empty_like(states).index_copy_(0, order, states).view(-1, self.top_k, x.shape[1])
        # Added one choice after another, the best first, in float32 as transformers does, so that a token's bits do not
        # depend on the batch.
        total = (parts[:, 0] * weights[:, :1]).float()
        for choice in range(1, self.top_k):
            total += parts[:, choice] * weights[:, choice, None]
        out = total.to(x.dtype)
        self._group.all_reduce(out)
        return out
