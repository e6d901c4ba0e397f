"""Translates requests into `Submit` messages, one for each text or pair, or refuses them with a clear 400."""

from collections.abc import Sequence

from ...config.config import EngineConfig
from ...ipc.messages import IdsPrompt, Limits, PairPrompt, Pooling, Sampling, Submit, TextPrompt, TextSpec, ids_to_bytes
from ..http.http_error import HttpError, unsupported
from .types import EmbeddingsRequest, PoolingRequest, RerankRequest, ScoreRequest

MAX_INPUTS = 2048  # of one request

_REFUSED = ("messages", "embed_dtype", "endianness", "use_activation", "rank_fields", "max_chunks_per_doc")


def embedding_submits(request: EmbeddingsRequest, config: EngineConfig, salt: bytes) -> list[Submit]:
    """One submit for each input. Raises HttpError."""
    purpose = config.model.purpose
    if request.dimensions is not None and request.dimensions > purpose.size:
        detail = f"dimensions must be at most {purpose.size}, the size of this model's vectors."
        raise HttpError(400, detail, param="dimensions")
    pooling = Pooling(
        purpose.pooling,
        purpose.is_normalized if request.normalize is None else request.normalize,
        request.dimensions,
        _truncation(request, config),
    )
    return _submits(request, _inputs(request, config), pooling, salt)


def score_pairs(request: ScoreRequest) -> list[PairPrompt]:
    """The pairs to be scored, in order. Raises HttpError."""
    names = ("text_1", "text_2") if request.text_1 is not None or request.text_2 is not None else ("queries", "items")
    columns = []
    for name in names:
        value: str | list[str] | None = getattr(request, name)
        if not value:
            raise HttpError(400, f"{name} must be a string or a list of strings, and not empty.", param=name)
        columns.append([value] if isinstance(value, str) else value)
    first, second = columns
    if len(first) == 1:
        first = first * len(second)
    if len(first) != len(second):
        detail = f"{names[0]} has {len(first)} texts and {names[1]} {len(second)}; it must have one or as many."
        raise HttpError(400, detail, param=names[0])
    return [PairPrompt(a, b) for a, b in zip(first, second, strict=True)]


def rerank_pairs(request: RerankRequest) -> list[PairPrompt]:
    """The query with each document. Raises HttpError."""
    if not request.documents:
        raise HttpError(400, "documents must not be empty.", param="documents")
    return [PairPrompt(request.query, text) for text in document_texts(request)]


def document_texts(request: RerankRequest) -> list[str]:
    """The texts of the documents, in order."""
    return [document if isinstance(document, str) else document.text for document in request.documents]


def pair_submits(
    request: ScoreRequest | RerankRequest, pairs: Sequence[PairPrompt], config: EngineConfig, salt: bytes
) -> list[Submit]:
    """One submit for each pair. Raises HttpError."""
    return _submits(request, pairs, Pooling("score", truncate=_truncation(request, config)), salt)


def _truncation(request: PoolingRequest, config: EngineConfig) -> int | None:
    if request.truncate_prompt_tokens == 0:
        raise HttpError(400, "truncate_prompt_tokens must be -1 or at least 1.", param="truncate_prompt_tokens")
    return config.max_model_len if request.truncate_prompt_tokens == -1 else request.truncate_prompt_tokens


def _inputs(request: EmbeddingsRequest, config: EngineConfig) -> list[TextPrompt | IdsPrompt]:
    value = [request.input] if isinstance(request.input, str) else request.input
    texts = [part for part in value if isinstance(part, str)]
    ids = [part for part in value if isinstance(part, int)]
    lists = [part for part in value if isinstance(part, list)]
    if len(value) not in (len(texts), len(ids), len(lists)) or not value or not all(lists):
        raise HttpError(
            400,
            "input must be a string, a list of strings, a list of token ids or a list of such lists, and not empty.",
            param="input",
        )
    if texts:
        prefix, add_special_tokens = _prefix(request, config), request.add_special_tokens is not False
        return [TextPrompt(prefix + text, add_special_tokens) for text in texts]
    if request.prompt_name is not None:
        raise HttpError(400, "prompt_name is for texts; token ids were sent.", param="prompt_name")
    return [IdsPrompt(ids_to_bytes(part)) for part in lists or [ids]]


def _prefix(request: EmbeddingsRequest, config: EngineConfig) -> str:
    purpose = config.model.purpose
    name = purpose.default_prompt if request.prompt_name is None else request.prompt_name
    if name is not None and name not in purpose.prompts:
        known = ", ".join(purpose.prompts) or "none"
        raise HttpError(400, f"prompt_name {name[:80]!r} is not one of this model's: {known}.", param="prompt_name")
    return "" if name is None else purpose.prompts[name]


def _submits(
    request: PoolingRequest, prompts: Sequence[TextPrompt | IdsPrompt | PairPrompt], pooling: Pooling, salt: bytes
) -> list[Submit]:
    for name in _REFUSED:
        if getattr(request, name, None) is not None:
            raise unsupported(name)
    if len(prompts) > MAX_INPUTS:
        raise HttpError(400, f"At most {MAX_INPUTS} texts can be sent at once; these are {len(prompts)}.")
    return [
        Submit(
            rid=0,
            n=1,
            prompt=prompt,
            sampling=Sampling(),
            limits=Limits(max_tokens=0, queue_timeout_s=request.timeout),
            text=TextSpec(detokenize=False),
            priority=request.priority or 0,
            salt=salt,
            tenant=salt.hex() or request.user or "",
            pooling=pooling,
        )
        for prompt in prompts
    ]
