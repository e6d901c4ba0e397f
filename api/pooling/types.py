"""The bodies of embeddings (OpenAI's), rerank (Jina's and Cohere's), and score, pooling and classify (vLLM's), with
the bounds of each field.

The rules are those of `api/openai/types.py`.
"""

from typing import Annotated, Literal

from msgspec import UNSET, Meta, Raw, Struct, UnsetType, field

from ..output.shapes import MessagesJson, TokenId

EmbedDtype = Literal["float32", "float16", "bfloat16"]
Endianness = Literal["native", "little", "big"]
PoolTask = Literal["embed", "token_embed", "score", "classify"]


class PoolingRequest(Struct, frozen=True, kw_only=True):
    """The common fields of the three."""

    model: str | None = None
    truncate_prompt_tokens: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None  # -1: to the model's context
    user: Annotated[str, Meta(max_length=512)] | None = None
    priority: Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)] | None = None
    timeout: Annotated[float, Meta(ge=1.0, le=1e9)] | None = None  # seconds to wait for a start before failing
    truncation_side: Literal["right"] | None = None  # the first tokens are kept
    padding: bool | Literal["longest", "do_not_pad"] | None = None  # ignored: no vector depends on it


class TextsRequest(PoolingRequest, frozen=True, kw_only=True):
    """Either `input`: a string, a list of strings, token ids, or a list of lists of token ids; or a conversation."""

    input: str | list[str | TokenId | list[TokenId]] | None = None
    messages: MessagesJson = field(default_factory=Raw)
    add_special_tokens: bool | None = None
    chat_template: str | None = None  # this and the next three: for `messages`, as in chat
    chat_template_kwargs: dict[str, object] | None = None
    add_generation_prompt: bool | None = None  # default: false
    continue_final_message: bool | None = None


class VectorsRequest(TextsRequest, frozen=True, kw_only=True):
    """What the requests for vectors have in common."""

    encoding_format: Literal["float", "base64", "bytes", "bytes_only"] | None = None
    embed_dtype: EmbedDtype | None = None  # of base64 and bytes; default: float32
    endianness: Endianness | None = None  # the same; default: little
    dimensions: Annotated[int, Meta(ge=1, le=2**31 - 1)] | None = None
    normalize: bool | None = None  # default: as the checkpoint says
    use_activation: bool | None = None  # vLLM's name of `normalize`
    prompt_name: str | None = None  # of the checkpoint's prompt that is put before each text


class EmbeddingsRequest(VectorsRequest, frozen=True, kw_only=True):
    """POST /v1/embeddings."""


class PoolRequest(VectorsRequest, frozen=True, kw_only=True):
    """POST /pooling."""

    task: PoolTask | None = None  # default: what the model is made for


class ClassifyRequest(TextsRequest, frozen=True, kw_only=True):
    """POST /classify."""

    use_activation: bool | None = None  # false is refused: the score is what the model's head gives


class ScoreRequest(PoolingRequest, frozen=True, kw_only=True):
    """POST /v1/score: one text with one or many, or pairs of two lists; under either pair of names."""

    text_1: str | list[str] | None = None
    text_2: str | list[str] | None = None
    queries: str | list[str] | None = None
    items: str | list[str] | None = None

    use_activation: bool | None = None  # false is refused: the score is what the model's head gives


class Document(Struct, frozen=True):
    text: str


class RerankRequest(PoolingRequest, frozen=True, kw_only=True):
    """POST /v1/rerank."""

    query: str
    documents: list[str | Document]
    top_n: Annotated[int, Meta(ge=1, le=2**31 - 1)] | None = None
    return_documents: bool | None = None
    use_activation: bool | None = None  # false is refused: the score is what the model's head gives

    # Refused.
    rank_fields: object = None
    max_chunks_per_doc: int | None = None


# ── answers ──────────────────────────────────────────────────────────────────────────────────────────────────────────


class PoolingUsage(Struct, frozen=True):
    prompt_tokens: int
    total_tokens: int


class EmbeddingBody(Struct, frozen=True):
    """One vector; as base64 it is the bytes of little-endian float32."""

    index: int
    embedding: list[float | list[float]] | str
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


class PoolingBody(Struct, frozen=True):
    """One vector, or one for each token."""

    index: int
    data: list[float | list[float]] | str
    object: Literal["pooling"] = "pooling"


class PoolingList(Struct, frozen=True):
    id: str
    created: int
    model: str
    data: list[PoolingBody]
    usage: PoolingUsage
    object: Literal["list"] = "list"


class ClassBody(Struct, frozen=True):
    index: int
    label: str
    probs: list[float]
    num_classes: int


class ClassList(Struct, frozen=True):
    id: str
    created: int
    model: str
    data: list[ClassBody]
    usage: PoolingUsage
    object: Literal["list"] = "list"


class BytesItem(Struct, frozen=True):
    """Where a vector is in a body of bytes, for the header `metadata`."""

    index: int
    embed_dtype: EmbedDtype
    endianness: Endianness
    start: int
    end: int
    shape: list[int]


class BytesMetadata(Struct, frozen=True):
    id: str
    created: int
    model: str
    data: list[BytesItem]
    usage: PoolingUsage
