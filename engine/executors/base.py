"""What the runner needs of a model, however it is computed."""

from typing import Protocol

from torch import Tensor

from ..attention.base import AttentionBackend
from ..attention.kv_cache import KvShape


class Model(Protocol):
    kv_shape: KvShape

    def hidden(
        self, ids: Tensor, positions: Tensor, attention: AttentionBackend, regimes: Tensor | None = None
    ) -> Tensor:
        """The forward pass over a step's tokens. ids, positions, regimes (see `RowOpen`; None: all 0): [tokens] int64 →
        [tokens, hidden_size]."""

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden: [positions, hidden_size], any selection of the hidden states → float32 [positions, vocab_size]."""

    def greedy(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """(greatest logit, its id): float32 [positions], int64 [positions]. The greatest is NaN if any logit is NaN."""


class DescribedModel(Model, Protocol):
    """A model that can be divided among stages, which compute its layers one after the other, and among KV domains."""

    def stage(
        self,
        ids: Tensor,
        positions: Tensor,
        attention: AttentionBackend,
        regimes: Tensor | None,
        received: Tensor | None,
    ) -> Tensor:
        """`hidden`, of this stage's layers. received: [tokens, columns] from the stage before, None for the first one.
        Returns what the next stage receives, or in the last stage the states that the head takes. Only the first stage
        reads the ids."""

    def help_others(self, attention: AttentionBackend) -> None:
        """A step for which this rank's KV domain has no tokens: computes this rank's part of the feed-forward layers
        for the other domains."""
