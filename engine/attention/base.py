"""The interface of attention backends, and the descriptions of a step and of a layer that they get.

The runner describes each step once with an `AttentionStep` and calls `begin`; the model's layers then call `forward`
with their queries, keys and values. Nothing here knows requests.
"""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from ...kernels.reference import RelativeBias
from ...kernels.states import StateRows, Tiles


@dataclass(frozen=True, kw_only=True)
class AttentionStep:
    """The rows of one step, whose tokens follow each other row by row; the first `num_decode` rows have one token each.

    Decode rows come in ascending order of context, so that rows of similar length can share one padded computation.
    Tables and slots are those of `CacheGroups.places`: one for each shelf of each group, but for states.
    """

    num_decode: int
    context_lens: NDArray[np.int64]  # [rows] keys each row sees, this step's tokens included
    query_lens: NDArray[np.int64]  # [rows] tokens of each row in this step
    tables: NDArray[np.int32]  # [tables, rows, max blocks] pages; any values where a row needs no block
    slots: Tensor  # [tables, tokens] int64: where each token's key and value are written
    order: NDArray[np.int64]  # [rows] index of each row into the plan's rows
    states: StateRows | None = None  # of models with recurrent layers: the pages of their states
    extension: bytes = b""  # `StepPlan.extension`, for backends of plan extensions
    # Of models with an encoder: each of the step's tokens as a row of one token, whose keys are those of the encoder.
    # Nothing is written for it.
    cross: "AttentionStep | None" = None


@dataclass(frozen=True, eq=False)
class Alibi:
    """Scores grow by slope · (key position - query position)."""

    slopes: Tensor  # [heads] float32
    before_scale: bool = False  # the term is multiplied by the scale, too
    rounded: bool = False  # slope · key position instead, both and the product rounded to bfloat16


@dataclass(frozen=True, kw_only=True, eq=False)
class AttentionParameters:
    """What distinguishes one layer's attention from another's. A layer keeps one such object: backends prepare for it
    once. Heads are those of this rank."""

    scale: float
    window: int | None = None  # a token sees itself and the window - 1 tokens before it
    chunk: int | None = None  # a token sees the tokens before it since a multiple of `chunk`
    softcap: float | None = None  # scores become softcap · tanh(score / softcap)
    sinks: Tensor | None = None  # [heads] float32: a logit that takes part in the softmax and has no value
    alibi: Alibi | None = None
    relative: RelativeBias | None = None
    latent: int = 0  # > 0: the values are the first `latent` numbers of the keys, and the tile has no values

    def __post_init__(self) -> None:
        assert self.window is None or self.chunk is None, self


class AttentionBackend(Protocol):
    """Attention over the paged cache. Writes the step's keys and values before it reads.

    Recurrent layers do not call it, but find here where their states are."""

    @property
    def states(self) -> StateRows | None:
        """The rows of the step that has begun, and the pages of their states. None: the model has no states."""

    def state_tiles(self, first: int, count: int, per_tile: int) -> Tiles:
        """Where the states of one layer are in those pages: the tiles [first, first + count) of `KvShape.states`, with
        `per_tile` units in each. The same object for the same layer."""

    def begin(self, step: AttentionStep) -> None:
        """Prepares for the layers of one step."""

    def forward(
        self,
        tile: int,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        parameters: AttentionParameters,
    ) -> Tensor:
        """Causal attention of one layer. tile: of the cache, where its keys and values are; query: [tokens, heads,
        head_dim]; key: [tokens, kv_heads, head_dim]; value: [tokens, kv_heads, value_dim], None if `latent`; without
        a key the layer reads what another one has written. Returns a new tensor [tokens, heads, value_dim]."""


class CrossBackend(AttentionBackend, Protocol):
    """A backend for the decoder of a model with an encoder."""

    @property
    def cross(self) -> AttentionBackend:
        """Attention to what the encoder has stored, for the tokens of the step that has begun. Its `forward` gets no
        keys."""
