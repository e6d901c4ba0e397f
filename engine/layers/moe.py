"""The feed-forward part of a mixture of experts: each token goes through the few experts that its router chooses."""

from collections.abc import Callable, Sequence
from itertools import chain
from typing import Literal

from torch import Tensor, nn

from ...kernels.ops import Experts, Matrix, Ops
from ...kernels.quantized_weight import StoredWeight
from ..parallel.collectives import Group
from .linear import Linear, packed, parameter

Stack = Literal["gate_up", "down"]


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
        ops: Ops,
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
        self._matrices: tuple[Matrix, ...] = ()
        self._quantized: dict[tuple[Stack, int], Matrix] = {}  # packed already, by stack and expert
        self._make = ops.experts
        self._experts: Experts | None = None
        self._group = group

    @property
    def matrices(self) -> tuple[Matrix, ...]:
        """The packed gate_up and down of each expert in turn. Set them to give or take matrices, as of a `Weight`."""
        return self._matrices

    @matrices.setter
    def matrices(self, matrices: tuple[Matrix, ...]) -> None:
        self.gate_up = self.down = None
        self._matrices = matrices
        pairs = list(zip(matrices[::2], matrices[1::2], strict=True))
        self._experts = self._make(pairs, self.top_k, self.renormalize, self._rounds_weights) if pairs else None

    @property
    def experts(self) -> Experts:
        assert self._experts is not None, "used before `pack`"
        return self._experts

    def pack(self, ops: Ops) -> None:
        """Packs the experts' weights for the kernels, except what `pack_quantized` did; the router packs itself. Two
        copies exist for a moment."""
        stacks = self.take()
        quantized, self._quantized = self._quantized, {}

        def made(stack: Stack, values: Tensor, pack: Callable[[Tensor], Matrix]) -> list[Matrix]:
            experts = range(self.num_experts)
            return [quantized[stack, i] if (stack, i) in quantized else pack(values[i]) for i in experts]

        gate_up, down = made("gate_up", stacks[0], ops.gated), made("down", stacks[1], ops.matrix)
        self.matrices = tuple(chain.from_iterable(zip(gate_up, down, strict=True)))

    def pack_quantized(self, ops: Ops, stack: Stack, expert: int, parts: Sequence[StoredWeight]) -> None:
        """Passes a quantized matrix of an expert to the kernels, in place of its values in the stack. parts: from the
        first rows to the last."""
        values, is_gated = self.get_parameter(stack), stack == "gate_up"
        pack = ops.gated if is_gated else ops.matrix
        self._quantized[stack, expert] = packed(ops, parts, values.dtype, pack, is_gated=is_gated)

    def take(self) -> tuple[Tensor, Tensor]:
        """The stacks; the module gives them up."""
        assert self.gate_up is not None and self.down is not None, "taken twice"
        stacks = self.gate_up.data, self.down.data
        self.gate_up = self.down = None
        return stacks

    def forward(self, x: Tensor) -> Tensor:
        out = self.experts.forward(x, self.gate(x))
        self._group.all_reduce(out)
        return out
