"""The bodies of OpenAI's API, as far as they are understood here, with the bounds of each field.

Requests: null is the same as absent, unknown fields are ignored (clients are ahead of servers), and what cannot be
served is named so that it is refused instead of ignored. Answers: one struct a shape; UNSET fields are left out.
Knows nothing of the engine; `translate` does.
"""

from typing import Annotated, Literal

from msgspec import UNSET, Meta, Raw, Struct, UnsetType, field

from ...config.config import BatchInvariance, ModelVersion
from ...ipc.messages import (
    MOST_ALLOWED_TOKENS,
    MOST_BAD_WORDS,
    MOST_BIASES,
    MOST_CHOICES,
    MOST_STOP_TOKENS,
    BadWord,
    StopString,
)

Probability = Annotated[float, Meta(ge=0.0, le=1.0)]
Penalty = Annotated[float, Meta(ge=-2.0, le=2.0)]
TokenId = Annotated[int, Meta(ge=0, le=2**31 - 1)]
StopStrings = Annotated[list[StopString], Meta(max_length=16)]
Bias = Annotated[float, Meta(ge=-100.0, le=100.0)]
FinishReason = Literal["stop", "length", "tool_calls"]

# What stays JSON: it is checked here and rendered elsewhere. The schemas are for /openapi.json.
MessagesJson = Annotated[
    Raw, Meta(extra_json_schema={"type": "array", "items": {"$ref": "#/components/schemas/Message"}, "minItems": 1})
]
ToolsJson = Annotated[
    Raw, Meta(extra_json_schema={"type": ["array", "null"], "items": {"$ref": "#/components/schemas/Tool"}})
]


# ── requests ─────────────────────────────────────────────────────────────────────────────────────────────────────────


class StreamOptions(Struct, frozen=True):
    """What a stream carries besides the text."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None  # in every event that of its choice so far; needs include_usage
    include_obfuscation: object = None  # ignored


JsonSchema = dict[str, object] | bool


class JsonSchemaFormat(Struct, frozen=True):
    """Enforced whether `strict` or not; the name and the description are the client's own."""

    schema: JsonSchema | None = None
    name: str | None = None
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(Struct, frozen=True):
    type: str
    json_schema: JsonSchemaFormat | None = None


class StructuredOutputs(Struct, frozen=True):
    """vLLM's: exactly one of the first five, and how spaces may stand in JSON."""

    json: JsonSchema | str | None = None  # a text holds the schema's JSON
    json_object: bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None  # Lark, or llama.cpp's GBNF
    disable_any_whitespace: bool | None = None
    whitespace_pattern: str | None = None
    disable_fallback: bool | None = None  # there is nothing to fall back to
    disable_additional_properties: bool | None = None  # it is always so where a schema does not say otherwise

    # Understood and refused.
    structural_tag: object = None


class GenerationRequest(Struct, frozen=True, kw_only=True):
    """What chat and completions have in common."""

    model: str | None = None
    n: Annotated[int, Meta(ge=1, le=MOST_CHOICES)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None
    temperature: Annotated[float, Meta(ge=0.0, le=2.0)] | None = None
    top_p: Annotated[float, Meta(gt=0.0, le=1.0)] | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    stop: StopString | StopStrings | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: Annotated[dict[TokenId, Bias], Meta(max_length=MOST_BIASES)] | None = None

    # What vLLM's users send in extra_body.
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    min_p: Probability | None = None
    repetition_penalty: Annotated[float, Meta(gt=0.0, le=100.0)] | None = None
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=MOST_STOP_TOKENS)] | None = None
    ignore_eos: bool | None = None
    min_tokens: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None
    allowed_token_ids: Annotated[list[TokenId], Meta(min_length=1, max_length=MOST_ALLOWED_TOKENS)] | None = None
    truncate_prompt_tokens: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    prompt_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    use_beam_search: bool | None = None
    length_penalty: Annotated[float, Meta(ge=-10.0, le=10.0)] | None = None  # of a beam search, like the next
    early_stopping: bool | None = None
    detokenize: bool | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None  # in log-probabilities: "token_id:5" for what may be no text
    return_timings: bool | None = None
    add_special_tokens: bool | None = None
    user: Annotated[str, Meta(max_length=512)] | None = None  # under --scheduling-policy fair: whose turn it is
    timeout: Annotated[float, Meta(ge=1.0, le=1e9)] | None = None  # seconds to wait for a start before failing
    priority: Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)] | None = None
    cache_salt: Annotated[str, Meta(pattern=r"^[A-Za-z0-9_-]{1,64}$")] | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: JsonSchema | str | None = None  # structured_outputs.json, as vLLM called it before, and so on
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    guided_whitespace_pattern: str | None = None
    thinking_token_budget: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None  # -1: no bound
    thinking_budget: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None  # the same, as others call it
    bad_words: Annotated[list[BadWord], Meta(max_length=MOST_BAD_WORDS)] | None = None

    # Accepted and ignored: they change nothing about the answer.
    metadata: object = None
    moderation: object = None
    prediction: object = None
    prompt_cache_key: object = None
    prompt_cache_options: object = None
    prompt_cache_retention: object = None
    request_id: object = None
    safety_identifier: object = None
    service_tier: object = None
    store: object = None

    # Understood and refused: to ignore these would give an answer that was not asked for.
    logits_processors: object = None
    kv_transfer_params: object = None
    prompt_embeds: object = None
    guided_decoding_backend: object = None


class ContentPart(Struct, frozen=True):
    """One part of a message's content; only texts are taken."""

    type: str
    text: str | None = None
    refusal: str | None = None


class FunctionCall(Struct, frozen=True):
    """The call that an assistant made; arguments are a JSON string, or already the object."""

    name: str
    arguments: str | dict[str, object] | None = None


class ToolCall(Struct, frozen=True):
    function: FunctionCall
    id: str | None = None
    type: Literal["function"] | None = None


class Message(Struct, frozen=True):
    """The shape that a message must have; the template gets the message as it was sent."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
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
    tools: ToolsJson = field(default_factory=Raw)  # a Raw cannot be `| None`: null arrives as that word
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
    echo: bool | None = None  # an answer that goes on with the final message begins with that message's text
    chat_template: Annotated[str, Meta(min_length=1, max_length=1 << 20)] | None = None  # if the operator trusts it
    verbosity: str | None = None
    resume_token_ids: list[list[TokenId]] | None = None  # what each choice is known to begin with

    # Understood and refused.
    audio: object = None
    functions: object = None
    function_call: object = None
    web_search_options: object = None


class CompletionRequest(GenerationRequest, frozen=True, kw_only=True):
    """POST /v1/completions. `prompt`: a text, a list of texts, token ids, or a list of lists of them."""

    prompt: str | list[str | TokenId | list[TokenId]]
    echo: bool | None = None
    logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    response_format: ResponseFormat | None = None
    best_of: Annotated[int, Meta(ge=1, le=MOST_CHOICES)] | None = None
    resume_token_ids: list[list[TokenId]] | None = None  # what each choice is known to begin with

    # Understood and refused.
    suffix: object = None


# ── answers ──────────────────────────────────────────────────────────────────────────────────────────────────────────


class PromptTokensDetails(Struct, frozen=True):
    cached_tokens: int


class CompletionTokensDetails(Struct, frozen=True):
    reasoning_tokens: int


class UsageBody(Struct, frozen=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | UnsetType = UNSET


class TimingsBody(Struct, frozen=True):
    """Where the time of a request went, in ms. Parts that it did not come to are left out; the others add up."""

    total_ms: float
    tokenizer_queue_ms: float | UnsetType = UNSET
    tokenize_ms: float | UnsetType = UNSET
    queue_ms: float | UnsetType = UNSET
    prefill_ms: float | UnsetType = UNSET
    decode_ms: float | UnsetType = UNSET


class TopLogprobBody(Struct, frozen=True):
    token: str
    logprob: float
    bytes: list[int]


class TokenLogprobBody(Struct, frozen=True):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprobBody]


class PromptLogprobBody(Struct, frozen=True):
    """One candidate of a position of the prompt, in vLLM's shape."""

    logprob: float
    rank: int | None  # 1: the best; null: not among those asked for
    decoded_token: str


PromptLogprobs = list[dict[int, PromptLogprobBody] | None]
"""By position: id → candidate; of the first there is none."""


class ChatLogprobs(Struct, frozen=True):
    content: list[TokenLogprobBody]
    refusal: None = None


class FunctionBody(Struct, frozen=True):
    arguments: str
    name: str | UnsetType = UNSET


class ToolCallBody(Struct, frozen=True):
    """In a message without `index`; in a delta the later ones carry neither id nor type nor name."""

    function: FunctionBody
    index: int | UnsetType = UNSET
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET


class ChatMessage(Struct, frozen=True):
    content: str | None
    role: Literal["assistant"] = "assistant"
    refusal: None = None
    tool_calls: list[ToolCallBody] | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET  # under both names, because clients read one or the other
    reasoning_content: str | UnsetType = UNSET


class ChatChoice(Struct, frozen=True):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason
    stop_reason: str | int | None
    token_ids: list[int] | UnsetType = UNSET


class ChatCompletion(Struct, frozen=True):
    id: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: UsageBody
    object: Literal["chat.completion"] = "chat.completion"
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    timings: TimingsBody | UnsetType = UNSET  # with `return_timings`


class ChatDelta(Struct, frozen=True):
    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET
    tool_calls: list[ToolCallBody] | UnsetType = UNSET
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


class CompletionLogprobs(Struct, frozen=True):
    """Columns, one entry a token; the first token of a prompt has no log-probability."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(Struct, frozen=True):
    """In a plain answer and, with `finish_reason` null until the last, in a stream."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class Completion(Struct, frozen=True):
    id: str
    created: int
    model: str
    choices: list[CompletionChoice]
    object: Literal["text_completion"] = "text_completion"
    usage: UsageBody | UnsetType | None = UNSET
    timings: TimingsBody | UnsetType = UNSET


class ModelCard(Struct, frozen=True):
    id: str
    created: int
    root: str
    max_model_len: int
    object: Literal["model"] = "model"
    owned_by: str = "pagewire"
    parent: None = None
    batch_invariance: BatchInvariance = "float32"  # how far tokens depend on what else is served
    versions: tuple[ModelVersion, ...] = ()  # that were served, and the one that is; none if nothing was ever swapped


class ModelList(Struct, frozen=True):
    data: list[ModelCard]
    object: Literal["list"] = "list"
