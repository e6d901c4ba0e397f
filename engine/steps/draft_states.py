"""Recurrent states behind the draft tokens of a step.

Keys and values of a rejected draft token are overwritten later, but a state cannot be taken back. Therefore a pass
stores the state of a row with draft tokens after each of its tokens but the last, in spare pages that only the worker
knows. Once it is known which draft tokens are accepted, the state that belongs to them becomes the row's.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...ipc.messages import StepPlan
from .rows import Rows


def within(draft_tokens: NDArray[np.int64], num_spares: int) -> NDArray[np.int64]:
    """The draft tokens of the first rows for which there are spare states; the others have none. [speculative rows]."""
    return np.where(np.cumsum(draft_tokens) <= num_spares, draft_tokens, 0)


@dataclass(frozen=True)
class DraftStates:
    """The rows of a plan with draft tokens, before the pass."""

    rows: NDArray[np.int64]  # [n]
    starts: NDArray[np.int64]  # [n] first position each row computes
    nums: NDArray[np.int64]  # [n] draft tokens of each
    pages: NDArray[np.int32]  # [sum of nums, k] where the states after 1, 2 … tokens of each row are kept

    @classmethod
    def of(
        cls, plan: StepPlan, rows: Rows, draft_tokens: NDArray[np.int64], spares: NDArray[np.int32]
    ) -> "DraftStates":
        """draft_tokens: [speculative rows]; spares: [states, k] pages, enough for all draft tokens."""
        places = np.flatnonzero(draft_tokens)
        drafted, nums = np.frombuffer(plan.rows, "<i4")[places].astype(np.int64), draft_tokens[places]
        return cls(drafted, rows.num_computed[drafted], nums, spares[: nums.sum()])

    @property
    def keep_rows(self) -> NDArray[np.int64]:
        """[sum of nums]"""
        return np.repeat(self.rows, self.nums)

    @property
    def keep_positions(self) -> NDArray[np.int64]:
        """[sum of nums]"""
        return np.repeat(self.starts - self._firsts, self.nums) + np.arange(len(self.pages)) + 1

    def copies(self, rows: Rows) -> tuple[Tensor, Tensor] | None:
        """After the pass, when `rows` know the accepted tokens: the pages to copy from and to. Both [pages] int64."""
        computed = rows.num_computed[self.rows] - self.starts
        is_back = computed <= self.nums  # the pass has left the state behind all draft tokens
        if not is_back.any():
            return None
        sources = self.pages[(self._firsts + computed - 1)[is_back]]
        targets = rows.state_written[self.rows[is_back]]
        return torch.from_numpy(sources.flatten().astype(np.int64)), torch.from_numpy(
            targets.flatten().astype(np.int64)
        )

    @property
    def _firsts(self) -> NDArray[np.int64]:
        """Where each row's states begin in `pages`."""
        return np.cumsum(self.nums) - self.nums
