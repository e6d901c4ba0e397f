"""The feed-forward part of a layer: gated, or a mixture of experts."""

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from ...kernels.triton.moe import MoeWorkspace, moe
from ...kernels.triton.rms_norm import rms_norm
from .products import Norm, Product

AddFeedForward = Callable[[Tensor, Norm, Tensor], None]
"""(stream, norm, num_tokens): stream += feed_forward(norm(stream)). stream: [tokens, hidden]."""


class FeedForward(Protocol):
    """Applies to the tokens of a step, of which the first `num_tokens` ([1] int32, on the device) are no padding."""

    def fused(self, tokens: int) -> "AddFeedForward | None":
        """The form fused with norm and residual, if it is faster for this number of tokens."""

    def __call__(self, x: Tensor, out: Tensor, num_tokens: Tensor) -> None:
        """out = feed_forward(x). Both [tokens, hidden]."""


class GatedFeedForward:
    """down(silu(gate(x)) · up(x))."""

    def __init__(self, gate_up: Product, down: Product, intermediate_size: int) -> None:
        self._gate_up, self._down = gate_up, down
        self._size = intermediate_size

    def fused(self, tokens: int) -> AddFeedForward | None:
        gate_up, down = self._gate_up.fused(tokens), self._down.fused(tokens)
        if gate_up is None or down is None:
            return None

        def add(stream: Tensor, norm: Norm, num_tokens: Tensor) -> None:
            inner = self._inner(stream)
            gate_up(stream, inner, norm=norm, is_gated=True)
            down(inner, stream, residual=stream)

        return add

    def __call__(self, x: Tensor, out: Tensor, num_tokens: Tensor) -> None:
        inner = self._inner(x)
        self._gate_up(x, inner, is_gated=True)
        self._down(inner, out)

    def _inner(self, x: Tensor) -> Tensor:
        return torch.empty((x.shape[0], self._size), dtype=x.dtype, device=x.device)


class MoeFeedForward:
    """The sum over a token's experts, chosen on the device."""

    def __init__(
        self,
        router: Product,
        gate_up: Tensor,
        down: Tensor,
        workspace: MoeWorkspace,
        *,
        top_k: int,
        renormalize: bool,
    ) -> None:
        """gate_up, down, top_k, renormalize: as in `kernels.triton.moe`, with its limits on types and sizes."""
        self._router = router
        self._gate_up, self._down = gate_up, down
        self._workspace = workspace
        self._top_k, self._renormalize = top_k, renormalize

    def fused(self, tokens: int) -> AddFeedForward | None:
        return self._add

    def _add(self, stream: Tensor, norm: Norm, num_tokens: Tensor) -> None:
        normed, delta = torch.empty_like(stream), torch.empty_like(stream)
        rms_norm(stream, norm.weight, norm.eps, normed)
        self(normed, delta, num_tokens)
        stream.add_(delta)

    def __call__(self, x: Tensor, out: Tensor, num_tokens: Tensor) -> None:
        logits = torch.empty((x.shape[0], self._down.shape[0]), dtype=x.dtype, device=x.device)
        self._router(x, logits)
        moe(
            out,
            x,
            logits,
            self._gate_up,
            self._down,
            num_tokens,
            self._workspace,
            top_k=self._top_k,
            renormalize=self._renormalize,
        )
