"""Log-probabilities of the raw logits, before temperature, penalties and bias, as in vLLM's `raw_logprobs`."""

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...ipc.messages import RowLogprobs
from .rows import Rows

_LEAST = -9999.0  # replaces -inf, which JSON cannot express
_LOGITS_BYTES = 32 << 20  # limit of the float32 logits of prompt positions at a time


def best_logprobs(logits: Tensor, chosen: Tensor, num_best: int) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """(ids, values), each [positions, 1 + num_best]: first the chosen token, then the best tokens, best first.

    logits: [positions, vocab] float32; chosen: [positions] int64. All values come from one tensor, so a chosen token
    that is the best has exactly the best value. A vocabulary smaller than `num_best` gives fewer columns.
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


def prompt_logprobs(
    rows: Rows,
    picked: NDArray[np.int64],
    starts: NDArray[np.int64],
    counts: NDArray[np.int64],
    order: NDArray[np.int64],
    logits_of: Callable[[int, int], Tensor],
    vocab_size: int,
) -> dict[int, RowLogprobs]:
    """The log-probabilities of the prompt tokens whose predecessors this step computed, for the rows that want them, by
    the row's index into the plan's rows.

    picked: [rows] in step order; starts, counts: [rows] the positions each computes; order: [rows] step order → index
    into the plan's rows; logits_of: (first, last) token of the step → float32 [tokens, vocab].
    """
    result = {}
    slice_len = max(1, _LOGITS_BYTES // (4 * vocab_size))
    for place in np.flatnonzero(rows.num_prompt_logprobs[picked] >= 0).tolist():
        row, start, first = int(picked[place]), int(starts[place]), int(counts[:place].sum())
        num_positions = min(int(counts[place]), int(rows.num_prompt[row]) - 1 - start)
        if num_positions <= 0:
            continue
        targets = torch.from_numpy(rows.ids[row, start + 1 : start + 1 + num_positions].astype(np.int64))
        parts = []
        for at in range(0, num_positions, slice_len):
            logits = logits_of(first + at, first + min(at + slice_len, num_positions))
            chosen = targets[at : at + slice_len].to(logits.device)
            parts.append(best_logprobs(logits, chosen, int(rows.num_prompt_logprobs[row])))
        ids, values = (np.concatenate(column) for column in zip(*parts, strict=True))
        result[int(order[place])] = row_logprobs(ids, values)
    return result
