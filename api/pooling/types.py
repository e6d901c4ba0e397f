"""The bodies of embeddings (OpenAI's), rerank (Jina's and Cohere's) and score (vLLM's), with the bounds of each field.

The rules are those of `api/openai/types.py`.
"""

from typing import Annotated, Literal

from msgspec import UNSET, Meta, Struct, UnsetType

from ..output.shapes import TokenId


class PoolingRequest(Struct, frozen=True, kw_only=True):
    """The common fields of the three."""

    model: str | None = None
    truncate_prompt_tokens: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None  # -1: to the model's context
    user: Annotated[str, Meta(max_length=512)] | None = None
    priority: Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)] | None = None
    timeout: Annotated[float, Meta(ge=1.0, le=1e9)] | None = None  # seconds to wait for a start before failing


class EmbeddingsRequest(PoolingRequest, frozen=True, kw_only=True):
    """POST /v1/embeddings. `input`: a string, a list of strings, token ids, or a list of lists of token ids."""

    input: str | list[str | TokenId | list[TokenId]]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Meta(ge=1, le=2**31 - 1)] | None = None
    add_special_tokens: bool | None = None
    normalize: bool | None = None  # default: as the checkpoint says
    prompt_name: str | None = None  # of the checkpoint's prompt that is put before each text

    # Refused.
    messages: object = None
    embed_dtype: object = None
    endianness: object = None


class ScoreRequest(PoolingRequest, frozen=True, kw_only=True):
    """POST /v1/score: one text with one or many, or pairs of two lists; under either pair of names."""

    text_1: str | list[str] | None = None
    text_2: str | list[str] | None = None
    queries: str | list[str] | None = None
    items: str | list[str] | None = None

    # Refused.
    use_activation: bool | None = None


class Document(Struct, frozen=True):
    text: str


class RerankRequest(PoolingRequest, frozen=True, kw_only=True):
    """POST /v1/rerank."""

    query: str
    documents: list[str | Document]
    top_n: Annotated[int, Meta(ge=1, le=2**31 - 1)] | None = None
    return_documents: bool | None = None

    # Refused.
    rank_fields: object = None
    max_chunks_per_doc: int | None = None
    use_activation: bool | None = None


# ── answers ──────────────────────────────────────────────────────────────────────────────────────────────────────────


class PoolingUsage(Struct, frozen=True):
    prompt_tokens: int
    total_tokens: int


class EmbeddingBody(Struct, frozen=True):
    """One vector; as base64 it is the bytes of little-endian float32."""

    index: int
    embedding: list[float] | str
    object: Literal["embedding"] = "embedding"


class EmbeddingList(Struct, frozen=True):
    data: list[EmbeddingBody]
    model: str
    usage: PoolingUsage
    object: Literal["list"] = "list"


class ScoreBody(Struct, frozen=True):
    index: int
    score: float
    object: Literal["score"] = "score"


class ScoreList(Struct, frozen=True):
    id: str
    created: int
    model: str
    data: list[ScoreBody]
    usage: PoolingUsage
    object: Literal["list"] = "list"


class RerankResult(Struct, frozen=True):
    index: int
    relevance_score: float
    document: Document | UnsetType = UNSET


class RerankBody(Struct, frozen=True):
    """Best first."""

    id: str
    model: str
    results: list[RerankResult]
    usage: PoolingUsage
