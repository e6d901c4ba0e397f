"""The answers of embeddings, pooling, classify, rerank and score: one object each, never streamed."""

import math
import time
from base64 import b64encode
from collections.abc import Sequence
from operator import mul

import msgspec

from ...ipc.messages import Chunk
from ..output.reply import Reply, new_id
from .number_formats import as_bytes, floats
from .types import (
    BytesItem,
    BytesMetadata,
    ClassBody,
    ClassList,
    Document,
    EmbeddingBody,
    EmbeddingList,
    PoolingBody,
    PoolingList,
    PoolingUsage,
    RerankBody,
    RerankResult,
    ScoreBody,
    ScoreList,
    VectorsRequest,
)

_encode = msgspec.json.Encoder().encode

Pairs = Sequence[tuple[int, int]]
"""The two texts of each pair, by the places of their vectors."""


class _VectorReply(Reply):
    """Collects the vector of each text."""

    def __init__(self, num: int, pairs: Pairs | None = None) -> None:
        """`pairs`: what is scored is how similar the vectors of texts are; None: each vector is a pair's score."""
        self._vectors = [b""] * num
        self._pairs = pairs
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
        vectors = [floats(vector) for vector in self._vectors]
        if self._pairs is None:
            return [vector[0] for vector in vectors]
        return [_cosine(vectors[first], vectors[second]) for first, second in self._pairs]


class VectorsReply(_VectorReply):
    """Embeddings, or with `is_pooling` what /pooling gives."""

    def __init__(
        self, request: VectorsRequest, *, model: str, num: int, is_pooling: bool = False, size: int | None = None
    ) -> None:
        """`size`: numbers of a token's vector, if there is one for each token."""
        super().__init__(num)
        self._model = model
        self._is_pooling = is_pooling
        self._size = size
        self._format = request.encoding_format or "float"
        self._dtype = request.embed_dtype or "float32"
        self._endianness = request.endianness or "little"
        self._items: list[BytesItem] = []
        if self._format.startswith("bytes"):
            self.body_type = b"application/octet-stream"

    def body(self) -> bytes:
        if self._format.startswith("bytes"):
            return self._bytes()
        shown = [self._shown(floats(vector)) for vector in self._vectors]
        if self._is_pooling:
            data = [PoolingBody(i, one) for i, one in enumerate(shown)]
            return _encode(PoolingList(new_id("pool-"), int(time.time()), self._model, data, self._usage))
        return _encode(EmbeddingList([EmbeddingBody(i, one) for i, one in enumerate(shown)], self._model, self._usage))

    def headers(self) -> Sequence[tuple[bytes, bytes]]:
        """Where the vectors are in a body of bytes."""
        if self._format != "bytes":
            return ()
        metadata = BytesMetadata(new_id("embd-"), int(time.time()), self._model, self._items, self._usage)
        return ((b"metadata", _encode(metadata)),)

    def _shown(self, numbers: list[float]) -> list[float | list[float]] | str:
        if self._format == "base64":
            return b64encode(as_bytes(numbers, self._dtype, self._endianness)).decode()
        if self._size is not None:
            return [numbers[at : at + self._size] for at in range(0, len(numbers), self._size)]
        return [*numbers]

    def _bytes(self) -> bytes:
        parts: list[bytes] = []
        start = 0
        for i, vector in enumerate(self._vectors):
            numbers = floats(vector)
            part = as_bytes(numbers, self._dtype, self._endianness)
            shape = [len(numbers)] if self._size is None else [len(numbers) // self._size, self._size]
            self._items.append(BytesItem(i, self._dtype, self._endianness, start, start + len(part), shape))
            start += len(part)
            parts.append(part)
        return b"".join(parts)


class ClassifyReply(_VectorReply):
    def __init__(self, *, model: str, num: int, labels: Sequence[str]) -> None:
        """`labels`: of the model; empty: it has one, without a name."""
        super().__init__(num)
        self._model = model
        self._labels = labels or ("LABEL_0",)

    def body(self) -> bytes:
        data = []
        for i, vector in enumerate(self._vectors):
            probs = floats(vector)
            data.append(ClassBody(i, self._labels[probs.index(max(probs))], probs, len(probs)))
        return _encode(ClassList(new_id("classify-"), int(time.time()), self._model, data, self._usage))


class ScoreReply(_VectorReply):
    def __init__(self, *, model: str, num: int, created: int, pairs: Pairs | None = None) -> None:
        super().__init__(num, pairs)
        self._model = model
        self._created = created

    def body(self) -> bytes:
        data = [ScoreBody(i, score) for i, score in enumerate(self._scores)]
        return _encode(ScoreList(new_id("score-"), self._created, self._model, data, self._usage))


class RerankReply(_VectorReply):
    def __init__(
        self,
        *,
        model: str,
        texts: Sequence[str],
        top_n: int | None,
        has_documents: bool,
        num: int,
        pairs: Pairs | None = None,
    ) -> None:
        super().__init__(num, pairs)
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


def _cosine(first: Sequence[float], second: Sequence[float]) -> float:
    lengths = math.sqrt(_dot(first, first) * _dot(second, second))
    return _dot(first, second) / lengths if lengths else 0.0


def _dot(first: Sequence[float], second: Sequence[float]) -> float:
    return math.fsum(map(mul, first, second))
