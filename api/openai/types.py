"""The bodies of chat, completions and models, with the bounds of each field.

Requests: null means the same as absent. Unknown fields are ignored, because clients are ahead of servers. Fields that
cannot be served are declared, so that they are refused and not ignored. Answers: UNSET fields are left out.
"""

from typing import Annotated, Literal

from msgspec import UNSET, Meta, Raw, Struct, UnsetType, field

from ...config.config import BatchInvariance, ModelVersion
from ...ipc.messages import MAX_CHOICES
from ..output.shapes import (
    FinishReason,
    GenerationRequest,
    JsonSchema,
    MessagesJson,
    PromptLogprobs,
    ResponseFormat,
    TimingsBody,
    TokenId,
    TokenLogprobBody,
    ToolsJson,
    UsageBody,
)
from .kv_transfer import TransferAnswer

# ── requests ─────────────────────────────────────────────────────────────────────────────────────────────────────────


class ContentPart(Struct, frozen=True):
    """One part of a message's content; only text is supported."""

    type: str
    text: str | None = None
    refusal: str | None = None


class FunctionCall(Struct, frozen=True):
    """A call by the assistant; `arguments` is a JSON string or the object."""

    name: str
    arguments: str | dict[str, object] | None = None


class ToolCall(Struct, frozen=True):
    function: FunctionCall
    id: str | None = None
    type: Literal["function"] | None = None


class Message(Struct, frozen=True):
    """The shape that a message must have. The chat template gets the message as it was sent."""

    role: Annotated[str, Meta(min_length=1, max_length=64)]  # templates may know others than the usual ones
    content: str | list[str | ContentPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None


class FunctionDefinition(Struct, frozen=True):
    name: Annotated[str, Meta(min_length=1)]
    description: str | None = None
    parameters: JsonSchema | None = None


class Tool(Struct, frozen=True):
    type: Literal["function"]
    function: FunctionDefinition


class ChatRequest(GenerationRequest, frozen=True, kw_only=True):
    """POST /v1/chat/completions"""

    messages: MessagesJson
    max_completion_tokens: Annotated[int, Meta(ge=1, le=2**31 - 1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    tools: ToolsJson = field(default_factory=Raw)  # a Raw cannot be `| None`; null arrives as b"null"
    tool_choice: str | dict[str, object] | None = None
    parallel_tool_calls: bool | None = None
    response_format: ResponseFormat | None = None
    reasoning_effort: str | None = None
    include_reasoning: bool | None = None
    modalities: list[str] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, object] | None = None
    documents: list[dict[str, object]] | None = None
    echo: bool | None = None  # an answer that continues the final message begins with its text
    # Needs --trust-request-chat-template.
    chat_template: Annotated[str, Meta(min_length=1, max_length=1 << 20)] | None = None
    verbosity: str | None = None
    # What came before tools; see `plain_tools`.
    functions: Annotated[list[FunctionDefinition], Meta(min_length=1)] | None = None
    function_call: str | dict[str, object] | None = None
    resume_token_ids: list[list[TokenId]] | None = None  # the first tokens of each choice, sampled by another engine

    # Refused.
    audio: object = None
    web_search_options: object = None


class CompletionRequest(GenerationRequest, frozen=True, kw_only=True):
    """POST /v1/completions. `prompt`: a string, a list of strings, token ids, or a list of lists of token ids."""

    prompt: str | list[str | TokenId | list[TokenId]]
    echo: bool | None = None
    logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    response_format: ResponseFormat | None = None
    best_of: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] | None = None
    resume_token_ids: list[list[TokenId]] | None = None  # the first tokens of each choice, sampled by another engine
    suffix: str | None = None  # what follows the output; needs a model with tokens for infilling


# ── answers ──────────────────────────────────────────────────────────────────────────────────────────────────────────


class ChatLogprobs(Struct, frozen=True):
    content: list[TokenLogprobBody]
    refusal: None = None


class FunctionBody(Struct, frozen=True):
    arguments: str
    name: str | UnsetType = UNSET


class CustomBody(Struct, frozen=True):
    """A call of a custom tool, whose input is a text."""

    input: str
    name: str | UnsetType = UNSET


class ToolCallBody(Struct, frozen=True):
    """A call, without `index` in a message. In a stream only its first delta has id, type and name."""

    function: FunctionBody | UnsetType = UNSET
    index: int | UnsetType = UNSET
    id: str | UnsetType = UNSET
    type: Literal["function", "custom"] | UnsetType = UNSET
    custom: CustomBody | UnsetType = UNSET  # in place of `function`


class ChatMessage(Struct, frozen=True):
    content: str | None
    role: Literal["assistant"] = "assistant"
    refusal: None = None
    tool_calls: list[ToolCallBody] | UnsetType = UNSET
    function_call: FunctionBody | UnsetType = UNSET  # if the request has `functions`
    reasoning: str | UnsetType = UNSET  # under both names, because clients read either
    reasoning_content: str | UnsetType = UNSET


class ChatChoice(Struct, frozen=True):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason
    stop_reason: str | int | None
    token_ids: list[int] | None = None


class ChatCompletion(Struct, frozen=True):
    id: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: UsageBody
    object: Literal["chat.completion"] = "chat.completion"
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: PromptLogprobs | None = None
    timings: TimingsBody | UnsetType = UNSET  # with `return_timings`
    kv_transfer_params: TransferAnswer | UnsetType = UNSET  # of a prefill leg
    service_tier: str | UnsetType = UNSET  # the request's latency class


class ChatDelta(Struct, frozen=True):
    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET
    tool_calls: list[ToolCallBody] | UnsetType = UNSET
    function_call: FunctionBody | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET


class ChatChunkChoice(Struct, frozen=True):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | UnsetType | None = UNSET
    token_ids: list[int] | UnsetType = UNSET


class ChatChunk(Struct, frozen=True):
    id: str
    created: int
    model: str
    choices: list[ChatChunkChoice]
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    usage: UsageBody | UnsetType | None = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    timings: TimingsBody | UnsetType = UNSET
    service_tier: str | UnsetType = UNSET  # the request's latency class


class CompletionLogprobs(Struct, frozen=True):
    """Columns with one entry per token; the first token of a prompt has no log-probability."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(Struct, frozen=True):
    """A choice of a plain answer or a stream, where `finish_reason` is null until the last chunk."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    # In a stream these are left out, and else null, if they were not asked for.
    token_ids: list[int] | UnsetType | None = UNSET
    prompt_token_ids: list[int] | UnsetType | None = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType | None = UNSET


class Completion(Struct, frozen=True):
    id: str
    created: int
    model: str
    choices: list[CompletionChoice]
    object: Literal["text_completion"] = "text_completion"
    usage: UsageBody | UnsetType | None = UNSET
    timings: TimingsBody | UnsetType = UNSET
    kv_transfer_params: TransferAnswer | UnsetType = UNSET  # of a prefill leg, not streamed
    service_tier: str | UnsetType = UNSET  # the request's latency class


class ModelCard(Struct, frozen=True):
    id: str
    created: int
    root: str
    max_model_len: int
    object: Literal["model"] = "model"
    owned_by: str = "pagewire"
    parent: None = None
    batch_invariance: BatchInvariance = "float32"  # how far tokens depend on what else is served
    state: str | UnsetType = UNSET  # of one of several models: unloaded, loading, loaded, leaving or failed
    progress: float | UnsetType = UNSET  # of reading the weights of one that is loading, 0 to 1
    versions: tuple[ModelVersion, ...] | UnsetType = UNSET  # served before and now, once the model was swapped


class ModelList(Struct, frozen=True):
    data: list[ModelCard]
    object: Literal["list"] = "list"
