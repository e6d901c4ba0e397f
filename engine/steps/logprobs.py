"""Log-probabilities of the raw logits, before temperature, penalties and bias, as in vLLM's `raw_logprobs`."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...ipc.messages import RowLogprobs
from .rows import Rows

_LEAST = -9999.0  # replaces -inf, which JSON cannot express
_LOGITS_BYTES = 32 << 20  # limit of the float32 logits of prompt positions at a time


def best_of(logits: Tensor, chosen: Tensor, num_best: int) -> tuple[Tensor, Tensor]:
    """(ids, values), each [positions, 1 + num_best]: first the chosen token, then the best tokens, best first. int32
    and float32, on the device of the logits, for which this does not wait.

    logits: [positions, vocab] float32; chosen: [positions] int64. All values come from one tensor, so a chosen token
    that is the best has exactly the best value. A vocabulary smaller than `num_best` gives fewer columns.
    """
    logprobs = torch.log_softmax(logits, dim=-1)
    ids, values = chosen[:, None], logprobs.gather(1, chosen[:, None])
    if num_best:
        best = torch.topk(logprobs, min(num_best, logits.shape[-1]), dim=-1)
        ids, values = torch.cat((ids, best.indices), dim=1), torch.cat((values, best.values), dim=1)
    return ids.to(torch.int32), torch.nan_to_num(values, nan=_LEAST, neginf=_LEAST)


def best_logprobs(logits: Tensor, chosen: Tensor, num_best: int) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """The results of `best_of` on the host."""
    ids, values = best_of(logits, chosen, num_best)
    return ids.cpu().numpy(), values.cpu().numpy()


def row_logprobs(ids: NDArray[np.int32], values: NDArray[np.float32]) -> RowLogprobs:
    """Packs consecutive positions of one row. Both [positions, width]."""
    return RowLogprobs(width=ids.shape[1], ids=ids.tobytes(), values=values.tobytes())


@dataclass(frozen=True)
class PromptScores:
    """The prompt tokens of one row whose predecessors a step computes, and whose log-probabilities are wanted."""

    index: int  # of the row in the plan's rows
    first: int  # the step's token before the first of them
    targets: NDArray[np.int32]  # [positions] the prompt tokens
    num_best: int

    def compute(
        self, targets: Tensor, logits_of: Callable[[int, int], Tensor], vocab_size: int
    ) -> tuple[Tensor, Tensor]:
        """(ids, values) as of `best_of`. targets: on the device, of any integer type; logits_of: (first, last) token of
        the step → float32 [tokens, vocab]."""
        size = max(1, _LOGITS_BYTES // (4 * vocab_size))
        parts = []
        for at in range(0, len(targets), size):
            logits = logits_of(self.first + at, self.first + min(at + size, len(targets)))
            parts.append(best_of(logits, targets[at : at + size].long(), self.num_best))
        ids, values = (torch.cat(column) for column in zip(*parts, strict=True))
        return ids, values


def prompt_scores(
    rows: Rows,
    picked: NDArray[np.int64],
    starts: NDArray[np.int64],
    counts: NDArray[np.int64],
    order: NDArray[np.int64],
) -> list[PromptScores]:
    """Of the rows that want them. picked: [rows] in step order; starts, counts: [rows] the positions each computes;
    order: [rows] step order → index into the plan's rows."""
    result = []
    for place in np.flatnonzero(rows.num_prompt_logprobs[picked] >= 0).tolist():
        row, start, first = int(picked[place]), int(starts[place]), int(counts[:place].sum())
        num_positions = min(int(counts[place]), int(rows.num_prompt[row]) - 1 - start)
        if num_positions > 0:
            targets = rows.ids[row, start + 1 : start + 1 + num_positions]
            num_best = int(rows.num_prompt_logprobs[row])
            result.append(PromptScores(int(order[place]), first, targets, num_best))
    return result
