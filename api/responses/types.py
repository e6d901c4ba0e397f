"""The bodies of OpenAI's Responses API. The rules are those of `api/openai/types.py`."""

from typing import Annotated, Literal

from msgspec import Meta, Struct

from ..output.shapes import CustomFormat, GenerationRequest, TextFormat, TokenId, TokenLogprobBody

Truncation = Literal["auto", "disabled"]

# ── requests ─────────────────────────────────────────────────────────────────────────────────────────────────────────


class InputPart(Struct, frozen=True):
    """One part of an item's content; only text is supported."""

    type: str
    text: str | None = None
    refusal: str | None = None


class InputItem(Struct, frozen=True):
    """An item of `input`; `type` says which fields count, and a message needs none."""

    type: str | None = None
    role: Literal["system", "developer", "user", "assistant"] | None = None
    content: str | list[InputPart] | None = None
    id: str | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    input: str | None = None  # of a call of a custom tool
    output: str | list[InputPart] | None = None


class ResponseTool(Struct, frozen=True):
    """A function, a custom tool, or a tool that a server would run itself."""

    type: str
    name: str | None = None
    description: str | None = None
    parameters: dict[str, object] | None = None
    strict: bool | None = None
    format: CustomFormat | None = None  # of a custom tool


class ConversationName(Struct, frozen=True):
    id: str


class TextConfig(Struct, frozen=True):
    format: TextFormat | None = None
    verbosity: str | None = None


class ReasoningConfig(Struct, frozen=True):
    effort: str | None = None
    summary: str | None = None


class ResponsesRequest(GenerationRequest, frozen=True, kw_only=True):
    """POST /v1/responses: OpenAI's fields, and vLLM's extensions of chat."""

    input: str | list[InputItem] | None = None
    instructions: str | None = None
    max_output_tokens: Annotated[int, Meta(ge=1, le=2**31 - 1)] | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    text: TextConfig | None = None
    tools: list[ResponseTool] | None = None
    tool_choice: str | dict[str, object] | None = None
    parallel_tool_calls: bool | None = None
    reasoning: ReasoningConfig | None = None
    previous_response_id: str | None = None
    store: bool | None = None  # like the next two and the identifiers below repeated in the answer
    metadata: dict[str, str] | None = None
    include: list[str] | None = None
    truncation: Truncation | None = None  # auto drops nothing either; see docs/http-api.md
    max_tool_calls: int | None = None  # of tools that the server runs; it runs none
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None
    chat_template_kwargs: dict[str, object] | None = None
    resume_token_ids: list[list[TokenId]] | None = None  # the first tokens of the answer, sampled by another engine
    resume_id: Annotated[str, Meta(pattern="^resp_[0-9a-f]{24}$")] | None = None  # of the answer that is resumed

    background: bool | None = None
    conversation: str | ConversationName | None = None

    # Refused.
    prompt: object = None
    context_management: object = None
    enable_response_messages: bool | None = None


# ── answers ──────────────────────────────────────────────────────────────────────────────────────────────────────────

ToolChoice = str | dict[str, object]
ItemStatus = Literal["in_progress", "completed", "incomplete"]


class OutputText(Struct, frozen=True, tag="output_text"):
    text: str
    annotations: list[object] = []
    logprobs: list[TokenLogprobBody] = []


class MessageItem(Struct, frozen=True, tag="message"):
    id: str
    status: ItemStatus
    content: list[OutputText]
    role: Literal["assistant"] = "assistant"


class ReasoningText(Struct, frozen=True, tag="reasoning_text"):
    text: str


class ReasoningItem(Struct, frozen=True, tag="reasoning"):
    id: str
    status: ItemStatus
    content: list[ReasoningText]
    summary: list[object] = []


class FunctionCallItem(Struct, frozen=True, tag="function_call"):
    id: str
    call_id: str
    name: str
    arguments: str
    status: ItemStatus


class CustomCallItem(Struct, frozen=True, tag="custom_tool_call"):
    id: str
    call_id: str
    name: str
    input: str
    status: ItemStatus


OutputItem = MessageItem | ReasoningItem | FunctionCallItem | CustomCallItem


class InputTokensDetails(Struct, frozen=True):
    cached_tokens: int
    cache_write_tokens: int = 0


class OutputTokensDetails(Struct, frozen=True):
    reasoning_tokens: int = 0


class ResponseUsage(Struct, frozen=True):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class IncompleteDetails(Struct, frozen=True):
    reason: Literal["max_output_tokens"]


class ResponseFailure(Struct, frozen=True):
    code: str
    message: str


class ResponseBody(Struct, frozen=True, kw_only=True):
    """The response object: the request's settings and the output so far."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    completed_at: int | None = None
    status: Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"] = "in_progress"
    error: ResponseFailure | None = None
    incomplete_details: IncompleteDetails | None = None
    model: str
    output: list[OutputItem] = []
    usage: ResponseUsage | None = None
    instructions: str | None
    metadata: dict[str, str]
    parallel_tool_calls: bool
    temperature: float
    top_p: float
    top_logprobs: int
    tool_choice: ToolChoice
    tools: list[ResponseTool]
    max_output_tokens: int | None
    max_tool_calls: int | None
    previous_response_id: str | None
    prompt_cache_key: str | None
    reasoning: ReasoningConfig
    safety_identifier: str | None
    store: bool
    text: TextConfig
    user: str | None
    truncation: Truncation
    background: bool = False
    conversation: ConversationName | None = None
    prompt: None = None
    service_tier: None = None


class ResponseEvent(Struct, frozen=True):
    """An event of a stream; `type` says which other fields it has."""

    type: str
    sequence_number: int


class ResponseDeleted(Struct, frozen=True):
    id: str
    object: Literal["response.deleted"] = "response.deleted"
    deleted: bool = True


class InputTokens(Struct, frozen=True):
    input_tokens: int
    object: Literal["response.input_tokens"] = "response.input_tokens"
