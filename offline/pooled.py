"""What `LLM.embed`, `LLM.score` and `LLM.encode` return, with vLLM's names."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..ipc.messages import Chunk, bytes_to_ids


@dataclass(frozen=True)
class EmbeddingOutput:
    embedding: list[float]


@dataclass(frozen=True)
class ScoringOutput:
    score: float


@dataclass(frozen=True)
class PoolingOutput:
    """The last hidden states of a prompt: float32 [tokens, hidden_size]."""

    data: NDArray[np.float32]


@dataclass(frozen=True)
class EmbeddingRequestOutput:
    prompt_token_ids: list[int]
    outputs: EmbeddingOutput


@dataclass(frozen=True)
class ScoringRequestOutput:
    prompt_token_ids: list[int]
    outputs: ScoringOutput


@dataclass(frozen=True)
class PoolingRequestOutput:
    prompt_token_ids: list[int]
    outputs: PoolingOutput


def embedding(chunk: Chunk) -> EmbeddingRequestOutput:
    return EmbeddingRequestOutput(_prompt(chunk), EmbeddingOutput(_vector(chunk).tolist()))


def score(chunk: Chunk) -> ScoringRequestOutput:
    return ScoringRequestOutput(_prompt(chunk), ScoringOutput(float(_vector(chunk)[0])))


def hidden_states(chunk: Chunk, size: int) -> PoolingRequestOutput:
    """`size`: of each token's vector."""
    return PoolingRequestOutput(_prompt(chunk), PoolingOutput(_vector(chunk).reshape(-1, size)))


def _prompt(chunk: Chunk) -> list[int]:
    assert chunk.prompt is not None, "the prompt was asked for"
    return list(bytes_to_ids(chunk.prompt.ids))


def _vector(chunk: Chunk) -> NDArray[np.float32]:
    return np.frombuffer(chunk.vector, "<f4")
