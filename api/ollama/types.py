"""The bodies of Ollama's API. The rules are those of `api/openai/types.py`, and of `api/llamacpp/sampling.py`."""

from typing import Annotated, Literal

from msgspec import UNSET, Meta, Raw, Struct, UnsetType, field

from ..llamacpp.sampling import SamplingOptions
from ..output.shapes import TokenLogprobBody

# ── requests ─────────────────────────────────────────────────────────────────────────────────────────────────────────


class Options(SamplingOptions, frozen=True, kw_only=True):
    """`num_ctx` and what configures llama.cpp are ignored: the server's own settings hold."""

    num_predict: Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)] | None = None


class CalledFunction(Struct, frozen=True):
    name: str
    arguments: dict[str, object] | str | None = None  # a string has the object's JSON
    index: object = None


class OllamaCall(Struct, frozen=True):
    function: CalledFunction
    id: str | None = None


class OllamaMessage(Struct, frozen=True):
    role: Literal["system", "user", "assistant", "tool"]
    content: str | None = None
    thinking: str | None = None
    tool_calls: list[OllamaCall] | None = None
    tool_name: str | None = None
    name: str | None = None  # an earlier name of `tool_name`
    tool_call_id: str | None = None
    images: list[object] | None = None  # refused unless empty


class OllamaRequest(Struct, frozen=True, kw_only=True):
    """What chat and generate have in common."""

    model: Annotated[str, Meta(min_length=1)]
    stream: bool | None = None  # by default an answer is streamed
    format: str | dict[str, object] | None = None  # "json", or a JSON schema
    options: Options | None = None
    think: bool | str | None = None  # or low, medium, high
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None

    # Ignored: the model stays loaded, and what is too long for its context is refused.
    keep_alive: object = None
    truncate: object = None
    shift: object = None


class OllamaChatRequest(OllamaRequest, frozen=True, kw_only=True):
    """POST /api/chat"""

    messages: list[OllamaMessage] | None = None
    tools: list[dict[str, object]] | None = None


class OllamaGenerateRequest(OllamaRequest, frozen=True, kw_only=True):
    """POST /api/generate"""

    prompt: str | None = None
    suffix: str | None = None
    system: str | None = None
    raw: bool | None = None

    # Refused.
    images: list[object] | None = None
    context: list[object] | None = None
    template: str | None = None


class EmbedRequest(Struct, frozen=True, kw_only=True):
    """POST /api/embed"""

    model: Annotated[str, Meta(min_length=1)]
    input: str | list[str]
    truncate: bool | None = None
    dimensions: Annotated[int, Meta(ge=1)] | None = None

    # Ignored.
    options: object = None
    keep_alive: object = None


class OldEmbeddingsRequest(Struct, frozen=True, kw_only=True):
    """POST /api/embeddings"""

    model: Annotated[str, Meta(min_length=1)]
    prompt: str

    # Ignored.
    options: object = None
    keep_alive: object = None


class ModelQuestion(Struct, frozen=True, kw_only=True):
    """POST /api/show and /api/pull"""

    model: str | None = None
    name: str | None = None  # an earlier name of `model`
    stream: bool | None = None

    # Ignored.
    verbose: object = None
    insecure: object = None


# ── answers ──────────────────────────────────────────────────────────────────────────────────────────────────────────


class FunctionOfCall(Struct, frozen=True):
    index: int
    name: str
    arguments: Annotated[Raw, Meta(extra_json_schema={"type": "object"})]


class CallOfAnswer(Struct, frozen=True):
    id: str
    function: FunctionOfCall


DoneReason = Literal["stop", "length", "load", "unload"]


class AnswerMessage(Struct, frozen=True):
    role: Literal["assistant"] = "assistant"
    content: str = ""
    thinking: str | UnsetType = UNSET
    tool_calls: list[CallOfAnswer] | UnsetType = UNSET


class Answer(Struct, frozen=True, kw_only=True):
    """A plain answer, or a line of a stream. Durations are in ns; only the last line has them. Chat has `message`,
    generate has `response` and `thinking`."""

    model: str
    created_at: str
    message: AnswerMessage | UnsetType = UNSET
    response: str | UnsetType = UNSET
    thinking: str | UnsetType = UNSET
    logprobs: list[TokenLogprobBody] | UnsetType = UNSET
    done: bool = False
    done_reason: DoneReason | UnsetType = UNSET
    total_duration: int | UnsetType = UNSET
    load_duration: int | UnsetType = UNSET
    prompt_eval_count: int | UnsetType = UNSET
    prompt_eval_duration: int | UnsetType = UNSET
    eval_count: int | UnsetType = UNSET
    eval_duration: int | UnsetType = UNSET


class EmbedAnswer(Struct, frozen=True):
    model: str
    embeddings: list[list[float]]
    total_duration: int
    prompt_eval_count: int
    load_duration: int = 0


class OldEmbeddingsAnswer(Struct, frozen=True):
    embedding: list[float]


class Details(Struct, frozen=True):
    parent_model: str = ""
    format: str = "safetensors"
    family: str = ""
    families: list[str] = field(default_factory=list)
    parameter_size: str = ""
    quantization_level: str = ""


class Tag(Struct, frozen=True):
    """A model that is served. The digest is that of the checkpoint's config and weights."""

    name: str
    model: str
    modified_at: str
    size: int  # bytes of the weights
    digest: str
    details: Details


class Tags(Struct, frozen=True):
    models: list[Tag]


class LoadedModel(Struct, frozen=True):
    name: str
    model: str
    size: int
    digest: str
    details: Details
    expires_at: str
    size_vram: int
    context_length: int


class LoadedModels(Struct, frozen=True):
    models: list[LoadedModel]


class Shown(Struct, frozen=True):
    """`model_info` has the context's length under the key `general.architecture` + `.context_length`."""

    modelfile: str
    parameters: str
    template: str
    details: Details
    model_info: dict[str, object]
    capabilities: list[str]
    modified_at: str
    license: str = ""
    system: str = ""


class Progress(Struct, frozen=True, omit_defaults=True):
    """Of a download; while a file comes, `digest` is its name, and `total` and `completed` are bytes."""

    status: str = ""
    digest: str = ""
    total: int = 0
    completed: int = 0
    error: str = ""  # one sentence; the download has failed


class OllamaVersion(Struct, frozen=True):
    version: str
