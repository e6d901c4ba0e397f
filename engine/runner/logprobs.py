"""Log-probabilities of the raw logits: before temperature, penalties and bias, as vLLM's `raw_logprobs`."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...ipc.messages import RowLogprobs

_LEAST = -9999.0  # stands for -inf, which JSON cannot carry


def best_logprobs(logits: Tensor, chosen: Tensor, num_best: int) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """(ids, values), each [positions, 1 + num_best]: the chosen token's first, then the best ones, best first.

    logits: [positions, vocab] float32; chosen: [positions] int64. Both kinds come from one tensor, so a chosen token
    that is the best has exactly the best one's value. A vocabulary smaller than `num_best` gives fewer columns.
    """
    logprobs = torch.log_softmax(logits, dim=-1)
    ids, values = chosen[:, None], logprobs.gather(1, chosen[:, None])
    if num_best:
        best = torch.topk(logprobs, min(num_best, logits.shape[-1]), dim=-1)
        ids, values = torch.cat((ids, best.indices), dim=1), torch.cat((values, best.values), dim=1)
    finite = torch.nan_to_num(values, nan=_LEAST, neginf=_LEAST)
    return ids.to(torch.int32).cpu().numpy(), finite.cpu().numpy()


def row_logprobs(ids: NDArray[np.int32], values: NDArray[np.float32]) -> RowLogprobs:
    """Packs consecutive positions of one row. Both [positions, width]."""
    return RowLogprobs(width=ids.shape[1], ids=ids.tobytes(), values=values.tobytes())
