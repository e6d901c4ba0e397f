"""The bodies of Anthropic's Messages API. The rules are those of `api/openai/types.py`."""

from typing import Annotated, Literal

from msgspec import Meta, Raw, Struct

from ..output.shapes import GenerationRequest, StopStrings, TextFormat, TokenId

# ── requests ─────────────────────────────────────────────────────────────────────────────────────────────────────────


class Citations(Struct, frozen=True):
    enabled: bool | None = None  # true is refused: answers cite nothing


class Source(Struct, frozen=True):
    """Of a document: texts only."""

    type: str | None = None
    data: str | None = None
    content: "str | list[Block] | None" = None


class Block(Struct, frozen=True):
    """A content block; `type` says which fields count. `cache_control` is ignored, because all is cached anyway."""

    type: str
    text: str | None = None
    thinking: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, object] | None = None
    tool_use_id: str | None = None
    content: "str | list[Block] | None" = None
    is_error: bool | None = None
    source: Source | str | None = None
    title: str | None = None
    context: str | None = None
    citations: Citations | None = None


class AnthropicMessage(Struct, frozen=True):
    role: Literal["user", "assistant", "system"]
    content: str | list[Block]


class AnthropicTool(Struct, frozen=True):
    name: Annotated[str, Meta(min_length=1)]
    input_schema: dict[str, object] | None = None
    description: str | None = None
    type: str | None = None


class AnthropicToolChoice(Struct, frozen=True):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(Struct, frozen=True):
    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None


class Metadata(Struct, frozen=True):
    user_id: Annotated[str, Meta(max_length=512)] | None = None


class OutputConfig(Struct, frozen=True):
    effort: str | None = None
    format: TextFormat | None = None


class ContextEdit(Struct, frozen=True):
    """An edit of the conversation by the server before it answers."""

    type: str


class ContextManagement(Struct, frozen=True):
    edits: list[ContextEdit] | None = None


class CountTokensRequest(GenerationRequest, frozen=True, kw_only=True):
    """POST /v1/messages/count_tokens"""

    messages: list[AnthropicMessage]
    system: str | list[Block] | None = None
    tools: list[AnthropicTool] | None = None
    tool_choice: AnthropicToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    chat_template_kwargs: dict[str, object] | None = None

    output_format: TextFormat | None = None  # the former name of output_config.format
    context_management: ContextManagement | None = None

    # Ignored: they do not change the answer.
    billing_policy: object = None
    cache_control: object = None
    diagnostics: object = None
    fallback_credit_token: object = None
    fallbacks: object = None
    inference_geo: object = None
    speed: object = None

    # Refused.
    compaction: object = None
    container: object = None
    mcp_servers: object = None
    thread: object = None


class MessagesRequest(CountTokensRequest, frozen=True, kw_only=True):
    """POST /v1/messages: Anthropic's fields, and vLLM's extensions of chat."""

    max_tokens: Annotated[int, Meta(ge=1, le=2**31 - 1)]
    stop_sequences: StopStrings | None = None
    metadata: Metadata | None = None
    resume_token_ids: list[list[TokenId]] | None = None  # the first tokens of the answer, sampled by another engine
    resume_id: Annotated[str, Meta(pattern="^msg_[0-9a-f]{24}$")] | None = None  # of the answer that is resumed


# ── answers ──────────────────────────────────────────────────────────────────────────────────────────────────────────

StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]


class TextBlock(Struct, frozen=True, tag="text"):
    text: str
    citations: None = None


class ThinkingBlock(Struct, frozen=True, tag="thinking"):
    thinking: str
    signature: str = ""  # not signed


class ToolUseBlock(Struct, frozen=True, tag="tool_use"):
    id: str
    name: str
    input: Annotated[Raw, Meta(extra_json_schema={"type": "object"})]


ContentBlock = TextBlock | ThinkingBlock | ToolUseBlock


class MessageUsage(Struct, frozen=True):
    """`input_tokens` does not include tokens from the prefix cache."""

    input_tokens: int
    output_tokens: int
    cache_creation_input_tokens: int = 0
    cache_read_input_tokens: int = 0


class MessageBody(Struct, frozen=True, tag="message"):
    id: str
    model: str
    content: list[ContentBlock]
    usage: MessageUsage
    stop_reason: StopReason | None = None
    stop_sequence: str | None = None
    role: Literal["assistant"] = "assistant"


class MessageEvent(Struct, frozen=True):
    """An event of a stream; `type` says which other fields it has."""

    type: str


class TokenCount(Struct, frozen=True):
    input_tokens: int
