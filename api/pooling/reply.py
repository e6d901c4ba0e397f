"""The answers of embeddings, rerank and score: one object each, never streamed."""

from array import array
from base64 import b64encode
from collections.abc import Sequence

import msgspec

from ...ipc.messages import Chunk
from ..output.reply import Reply, new_id
from .types import (
    Document,
    EmbeddingBody,
    EmbeddingList,
    PoolingUsage,
    RerankBody,
    RerankResult,
    ScoreBody,
    ScoreList,
)

_encode = msgspec.json.Encoder().encode


class _VectorReply(Reply):
    """Collects the vector of each text."""

    def __init__(self, num: int) -> None:
        self._vectors = [b""] * num
        self._num_prompt = 0

    def take(self, index: int, chunk: Chunk) -> list[bytes]:
        """Takes the vector of a text."""
        assert chunk.vector and chunk.usage is not None, "a vector is an answer's only chunk"
        self._vectors[index] = chunk.vector
        self._num_prompt += chunk.usage.num_prompt
        return []

    def opening(self) -> list[bytes]:
        raise AssertionError("vectors are not streamed")

    def closing(self) -> list[bytes]:
        raise AssertionError("vectors are not streamed")

    @property
    def _usage(self) -> PoolingUsage:
        return PoolingUsage(self._num_prompt, self._num_prompt)

    @property
    def _scores(self) -> list[float]:
        return [_numbers(vector)[0] for vector in self._vectors]


class EmbeddingsReply(_VectorReply):
    def __init__(self, *, model: str, num: int, is_base64: bool) -> None:
        super().__init__(num)
        self._model = model
        self._is_base64 = is_base64

    def body(self) -> bytes:
        show = _base64 if self._is_base64 else _numbers
        data = [EmbeddingBody(i, show(vector)) for i, vector in enumerate(self._vectors)]
        return _encode(EmbeddingList(data, self._model, self._usage))


class ScoreReply(_VectorReply):
    def __init__(self, *, model: str, num: int, created: int) -> None:
        super().__init__(num)
        self._model = model
        self._created = created

    def body(self) -> bytes:
        data = [ScoreBody(i, score) for i, score in enumerate(self._scores)]
        return _encode(ScoreList(new_id("score-"), self._created, self._model, data, self._usage))


class RerankReply(_VectorReply):
    def __init__(self, *, model: str, texts: Sequence[str], top_n: int | None, has_documents: bool) -> None:
        super().__init__(len(texts))
        self._model = model
        self._texts = texts
        self._top_n = top_n
        self._has_documents = has_documents

    def body(self) -> bytes:
        scores = self._scores
        best = sorted(range(len(scores)), key=lambda i: -scores[i])[: self._top_n]
        results = [
            RerankResult(i, scores[i], Document(self._texts[i]) if self._has_documents else msgspec.UNSET) for i in best
        ]
        return _encode(RerankBody(new_id("rerank-"), self._model, results, self._usage))


def _numbers(vector: bytes) -> list[float]:
    return array("f", vector).tolist()


def _base64(vector: bytes) -> str:
    return b64encode(vector).decode()
