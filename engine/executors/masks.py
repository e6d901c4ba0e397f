"""Determines what an attention mask of transformers means for contexts of any length.

transformers builds a mask from a function of two positions. `describe_mask` replaces that step: it evaluates the
function at distances that no short trial reaches, and returns a mask that only carries the result.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

REACH = "pagewire_reach"  # attribute of a mask: its window in tokens, None if it is only causal, or `UNKNOWN`
UNKNOWN = -1
_FAR = 2**22  # a position beyond any context

Sees = Callable[[Any, Any, Any, Any], Any]  # (batch, head, position of the query, position of the key) → whether


def describe_mask(
    batch_size: int, q_length: int, kv_length: int, *, mask_function: Sees, device: torch.device, **kwargs: Any
) -> Tensor:
    """Registered as transformers' mask function for an attention that computes nothing."""
    mask = torch.zeros((batch_size, 1, q_length, kv_length), device=device)
    setattr(mask, REACH, reach_of(mask_function, kwargs.get("local_size")))
    return mask


def reach_of(sees: Sees, local_size: int | None) -> int | None:
    """The window of a mask function; None: only causal. local_size: the window or chunk size that the model
    declares."""

    def distances(query: int, *keys: int) -> list[bool]:
        zero = torch.tensor(0)
        return [bool(sees(zero, zero, torch.tensor(query), torch.tensor(query - key))) for key in keys]

    try:
        if distances(_FAR, -1, 0) != [False, True]:
            return UNKNOWN
        if distances(_FAR, 1, _FAR // 2, _FAR) == [True] * 3:
            return None
        for query in (_FAR, _FAR + 1, _FAR + (local_size or 0) // 2):  # chunks have borders
            if local_size is None or distances(query, local_size - 1, local_size) != [True, False]:
                return UNKNOWN
    except (RuntimeError, IndexError):  # the function reads tensors that this step does not have
        return UNKNOWN
    return local_size
