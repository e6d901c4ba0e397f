"""Translates requests into `Submit` messages, one for each text or pair, or refuses them with a clear 400."""

from collections.abc import Sequence
from typing import Literal, NamedTuple

from ...config.config import EngineConfig
from ...ipc.messages import (
    ChatPrompt,
    IdsPrompt,
    Limits,
    PairPrompt,
    Pooling,
    Sampling,
    Submit,
    TextPrompt,
    TextSpec,
    ids_to_bytes,
)
from ..http.http_error import HttpError, unsupported
from ..openai.translate import chat_prompt
from ..openai.types import ChatRequest
from .types import PoolingRequest, RerankRequest, ScoreRequest, TextsRequest, VectorsRequest

MAX_INPUTS = 2048  # of one request
MAX_DESCRIBED = 64  # vectors whose places are in a header

_REFUSED = ("rank_fields", "max_chunks_per_doc")
_OF_CHAT = ("chat_template", "chat_template_kwargs", "add_generation_prompt", "continue_final_message")


class Scoring(NamedTuple):
    """The submits of pairs of texts. `pairs`: see `reply.Pairs`."""

    submits: list[Submit]
    pairs: list[tuple[int, int]] | None


def embedding_submits(
    request: VectorsRequest, config: EngineConfig, salt: bytes, how: Literal["all"] | None = None
) -> list[Submit]:
    """One submit for each input. `how`: all for a vector of each token. Raises HttpError."""
    purpose = config.model.purpose
    if request.dimensions is not None and request.dimensions > purpose.size:
        detail = f"dimensions must be at most {purpose.size}, the size of this model's vectors."
        raise HttpError(400, detail, param="dimensions")
    if None not in (request.normalize, request.use_activation) and request.normalize != request.use_activation:
        raise HttpError(400, "normalize and use_activation contradict each other.", param="use_activation")
    asked = request.normalize if request.normalize is not None else request.use_activation
    pooling = Pooling(
        how or purpose.pooling,
        (how is None and purpose.is_normalized) if asked is None else asked,
        request.dimensions,
        _truncation(request, config),
    )
    submits = _submits(request, _inputs(request, config, request.prompt_name), pooling, salt)
    if request.encoding_format == "bytes" and len(submits) > MAX_DESCRIBED:
        detail = f"encoding_format bytes describes at most {MAX_DESCRIBED} vectors; bytes_only has no such limit."
        raise HttpError(400, detail, param="encoding_format")
    return submits


def class_submits(request: TextsRequest, config: EngineConfig, salt: bytes) -> list[Submit]:
    """One submit for each text that is classified. Raises HttpError."""
    return _submits(
        request, _inputs(request, config, None), Pooling("score", truncate=_truncation(request, config)), salt
    )


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
) -> Scoring:
    """One submit for each pair; of an embedding model, one for each text. Raises HttpError."""
    purpose = config.model.purpose
    if "score" in purpose.tasks or "embed" not in purpose.tasks:
        return Scoring(_submits(request, pairs, Pooling("score", truncate=_truncation(request, config)), salt), None)
    prompts, default = purpose.prompts, purpose.prompts.get(purpose.default_prompt or "", "")
    before = after = default
    if isinstance(request, RerankRequest):
        before = prompts.get("query", default)
        after = prompts.get("document", prompts.get("passage", default))
    places: dict[str, int] = {}
    found = [
        (places.setdefault(before + pair.first, len(places)), places.setdefault(after + pair.second, len(places)))
        for pair in pairs
    ]
    texts = [TextPrompt(text) for text in places]
    return Scoring(
        _submits(request, texts, Pooling(purpose.pooling, True, None, _truncation(request, config)), salt), found
    )


def _truncation(request: PoolingRequest, config: EngineConfig) -> int | None:
    if request.truncate_prompt_tokens == 0:
        raise HttpError(400, "truncate_prompt_tokens must be -1 or at least 1.", param="truncate_prompt_tokens")
    return config.max_model_len if request.truncate_prompt_tokens == -1 else request.truncate_prompt_tokens


def _inputs(
    request: TextsRequest, config: EngineConfig, prompt_name: str | None
) -> list[TextPrompt | IdsPrompt | ChatPrompt]:
    if bytes(request.messages) not in (b"", b"null"):
        if request.input is not None:
            raise HttpError(400, "Send either input or messages.", param="messages")
        return [_conversation(request, config)]
    if request.input is None:
        raise HttpError(400, "Send either input or messages.", param="input")
    for name in _OF_CHAT:
        if getattr(request, name) is not None:
            raise HttpError(400, f"{name} is only allowed with messages.", param=name)
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
        prefix, add_special_tokens = _prefix(prompt_name, config), request.add_special_tokens is not False
        return [TextPrompt(prefix + text, add_special_tokens) for text in texts]
    if prompt_name is not None:
        raise HttpError(400, "prompt_name is for texts; token ids were sent.", param="prompt_name")
    return [IdsPrompt(ids_to_bytes(part)) for part in lists or [ids]]


def _conversation(request: TextsRequest, config: EngineConfig) -> ChatPrompt:
    chat = ChatRequest(
        messages=request.messages,
        add_special_tokens=request.add_special_tokens,
        add_generation_prompt=bool(request.add_generation_prompt),
        continue_final_message=request.continue_final_message,
        chat_template=request.chat_template,
        chat_template_kwargs=request.chat_template_kwargs,
    )
    return chat_prompt(chat, config)


def _prefix(prompt_name: str | None, config: EngineConfig) -> str:
    purpose = config.model.purpose
    name = purpose.default_prompt if prompt_name is None else prompt_name
    if name is not None and name not in purpose.prompts:
        known = ", ".join(purpose.prompts) or "none"
        raise HttpError(400, f"prompt_name {name[:80]!r} is not one of this model's: {known}.", param="prompt_name")
    return "" if name is None else purpose.prompts[name]


def _submits(
    request: PoolingRequest,
    prompts: Sequence[TextPrompt | IdsPrompt | ChatPrompt | PairPrompt],
    pooling: Pooling,
    salt: bytes,
) -> list[Submit]:
    for name in _REFUSED:
        if getattr(request, name, None) is not None:
            raise unsupported(name)
    is_vector = isinstance(request, VectorsRequest) and pooling.how != "score"
    if not is_vector and getattr(request, "use_activation", None) is False:
        raise unsupported(
            "use_activation", "use_activation false is not supported: a score is what the model's head gives."
        )
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
