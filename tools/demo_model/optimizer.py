"""Muon in float32, for the matrices of the demo model.

The same update as `torch.optim.Muon` (Nesterov momentum, orthogonalised by five
Newton-Schulz steps), which works in bfloat16: slow on a CPU without such
instructions. Matrices of one shape are handled together.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)


def orthogonalise(x: Tensor, steps: int = 5) -> Tensor:
    """Nearly orthogonal matrices from a stack [matrices, rows, columns] of float32."""
    a, b, c = NEWTON_SCHULZ
    tall = x.shape[1] > x.shape[2]
    if tall:
        x = x.mT
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if tall else x


class Muon:
    """Momentum and update of a fixed set of matrices; the caller sets `rate` per step."""

    def __init__(
        self,
        matrices: Iterable[Tensor],
        rate: float = 0.02,
        momentum: float = 0.95,
        weight_decay: float = 0.01,
    ) -> None:
        self.rate, self.momentum, self.weight_decay = rate, momentum, weight_decay
        self._stacks: dict[torch.Size, list[Tensor]] = {}
        for matrix in matrices:
            self._stacks.setdefault(matrix.shape, []).append(matrix)
        self._moments = {shape: torch.zeros(len(stack), *shape) for shape, stack in self._stacks.items()}

    @torch.no_grad()
    def step(self) -> None:
        for shape, stack in self._stacks.items():
            gradient = torch.stack([m.grad for m in stack if m.grad is not None])
            moment = self._moments[shape].lerp_(gradient, 1 - self.momentum)
            update = orthogonalise(gradient.lerp(moment, self.momentum))
            scale = self.rate * max(1.0, shape[0] / shape[1]) ** 0.5
            for matrix, direction in zip(stack, update, strict=True):
                matrix.mul_(1 - self.rate * self.weight_decay).add_(direction, alpha=-scale)
                matrix.grad = None
