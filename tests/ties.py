"""Where rounding decides what a mixture of experts computes: a score lies on a threshold of the router, so two right
implementations may weight the experts differently, and log-probabilities differ by more than half.

Only PhiMoE's router (sparsemixer) has so many thresholds that random prompts meet them: about one token in two
thousand.
"""

from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from transformers.models.phimoe import modeling_phimoe

NEAR = 4e-6  # relative. Differences came with margins up to 1.4e-6; a product of 64 numbers rounds by about as much.


def margins(scores: Tensor, jitter: float, top_k: int) -> Tensor:
    """How far the scores of each token are from another result, relative: float64 [tokens]. scores: [tokens,
    experts]."""
    scores, far = scores.double(), 1.0
    left, found = scores, torch.full(scores.shape[:1], far, dtype=torch.float64)
    for _ in range(top_k):
        (first, second), (best, index) = left.topk(2, dim=-1).values.unbind(-1), left.max(dim=-1, keepdim=True)
        of_choice = (first - second) / first.abs()
        of_threshold = ((best - scores) / scores.abs().clamp(min=best) - 2 * jitter).abs()
        of_threshold = of_threshold.masked_fill(left.isinf(), far).scatter(1, index, far).amin(dim=-1)
        found = torch.minimum(found, torch.minimum(of_choice, of_threshold))
        left = left.scatter(1, index, -torch.inf)
    return found


def are_equal(model: Any, ids: list[int], tokens: tuple[int, int]) -> bool:
    """Whether the model's logits of two next tokens differ by no more than rounding explains: `NEAR` times the largest
    logit, which counts as 1 at least."""
    with torch.inference_mode():
        logits = model(torch.tensor([ids]), use_cache=False).logits[0, -1]
    first, second = (float(logits[token]) for token in tokens)
    return abs(first - second) <= NEAR * max(1.0, float(logits.abs().max()))


def first_tie(model: Any, ids: list[int]) -> int:
    """The first position at which rounding decides; len(ids): there is none."""
    compute: Any = modeling_phimoe.sparsemixer
    of_layers: list[Tensor] = []

    def watched(scores: Tensor, jitter_eps: float, training: bool, top_k: int = 2) -> Any:
        of_layers.append(margins(scores, jitter_eps, top_k))
        return compute(scores, jitter_eps, training, top_k)

    with patch.object(modeling_phimoe, "sparsemixer", watched), torch.inference_mode():
        model(torch.tensor([ids]), use_cache=False)
    if not of_layers:
        return len(ids)
    near = torch.stack(of_layers).amin(dim=0) < NEAR
    return int(near.nonzero()[0]) if near.any() else len(ids)
