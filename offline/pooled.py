"""What `LLM.embed`, `LLM.score` and `LLM.encode` return, with vLLM's names."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..config.config import Purpose
from ..ipc.messages import Chunk, Pooling, bytes_to_ids


@dataclass(kw_only=True)
class PoolingParams:
    """What is computed of a prompt. Bounds are checked when a request is made."""

    task: str | None = None  # embed, token_embed, classify or score; None: what the model is for
    dimensions: int | None = None  # shortens a vector
    use_activation: bool | None = None  # False: a vector is not normalized; None: as the model's configuration says
    truncate_prompt_tokens: int | None = None  # cuts off the end of a longer prompt

    def pooling(self, purpose: Purpose) -> Pooling:
        """Raises ValueError."""
        task = self.task or ("embed" if "embed" in purpose.tasks or "generate" in purpose.tasks else "score")
        if task == "token_embed":
            return Pooling("all", truncate=self.truncate_prompt_tokens)
        if task in ("classify", "score"):
            if self.use_activation is not None:
                raise ValueError("PoolingParams: use_activation is not there for scores: the checkpoint says it.")
            return Pooling("score", truncate=self.truncate_prompt_tokens)
        if task != "embed":
            raise ValueError(f"PoolingParams: task is embed, token_embed, classify or score, not {task!r}.")
        is_normalized = purpose.is_normalized if self.use_activation is None else self.use_activation
        return Pooling(purpose.pooling, is_normalized, self.dimensions, self.truncate_prompt_tokens)


@dataclass(frozen=True)
class EmbeddingOutput:
    embedding: list[float]


@dataclass(frozen=True)
class ScoringOutput:
    score: float


@dataclass(frozen=True)
class PoolingOutput:
    """A vector of a prompt: float32 [size]; or one of each token: [tokens, size]."""

    data: NDArray[np.float32]


@dataclass(frozen=True)
class ClassificationOutput:
    """One probability for each label."""

    probs: list[float]


@dataclass(frozen=True)
class EmbeddingRequestOutput:
    prompt_token_ids: list[int]
    outputs: EmbeddingOutput
    request_id: str = ""
    finished: bool = True


@dataclass(frozen=True)
class ScoringRequestOutput:
    prompt_token_ids: list[int]
    outputs: ScoringOutput
    request_id: str = ""
    finished: bool = True


@dataclass(frozen=True)
class ClassificationRequestOutput:
    prompt_token_ids: list[int]
    outputs: ClassificationOutput
    request_id: str = ""
    finished: bool = True


@dataclass(frozen=True)
class PoolingRequestOutput:
    prompt_token_ids: list[int]
    outputs: PoolingOutput
    request_id: str = ""
    finished: bool = True


def classification(chunk: Chunk) -> ClassificationRequestOutput:
    return ClassificationRequestOutput(_prompt(chunk), ClassificationOutput(_vector(chunk).tolist()))


def plain(chunk: Chunk, how: str, size: int, request_id: str = "") -> PoolingRequestOutput:
    """`how`: of the request's `Pooling`. `size`: of each token's vector."""
    vector = _vector(chunk)
    return PoolingRequestOutput(
        _prompt(chunk), PoolingOutput(vector.reshape(-1, size) if how == "all" else vector), request_id
    )


def embedding(chunk: Chunk) -> EmbeddingRequestOutput:
    return EmbeddingRequestOutput(_prompt(chunk), EmbeddingOutput(_vector(chunk).tolist()))


def score(chunk: Chunk) -> ScoringRequestOutput:
    return ScoringRequestOutput(_prompt(chunk), ScoringOutput(float(_vector(chunk)[0])))


def _prompt(chunk: Chunk) -> list[int]:
    assert chunk.prompt is not None, "the prompt was asked for"
    return list(bytes_to_ids(chunk.prompt.ids))


def _vector(chunk: Chunk) -> NDArray[np.float32]:
    return np.frombuffer(chunk.vector, "<f4")
