"""The interface of attention backends, and the description of a step that they get.

The runner describes each step once with an `AttentionStep` and calls `begin`; the model's layers then call `forward`
with their queries, keys and values. Nothing here knows requests.
"""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class AttentionStep:
    """The rows of one step, whose tokens follow each other row by row; the first `num_decode` rows have one token each.

    Decode rows come in ascending order of context, so that rows of similar length can share one padded computation.
    """

    num_decode: int
    context_lens: NDArray[np.int64]  # [rows] keys each row sees, this step's tokens included
    query_lens: NDArray[np.int64]  # [rows] tokens of each row in this step
    block_table: NDArray[np.int32]  # [rows, max blocks]; any values beyond a row's own blocks
    slots: Tensor  # [tokens] int64: where each token's key and value are written
    fresh_blocks: Tensor | None  # int64: blocks that this step begins and leaves partly empty
    order: NDArray[np.int64]  # [rows] index of each row into the plan's rows
    extension: bytes = b""  # `StepPlan.extension`, for backends of plan extensions


class AttentionBackend(Protocol):
    """Attention over the paged cache. Writes the step's keys and values before it reads."""

    def begin(self, step: AttentionStep) -> None:
        """Prepares for the layers of one step."""

    def forward(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
    ) -> Tensor:
        """Causal attention of one layer. query: [tokens, heads, dim]; key, value: [tokens, kv_heads, dim]. Returns a
        new tensor like query. With `window` w a token sees itself and the w - 1 tokens before it."""
