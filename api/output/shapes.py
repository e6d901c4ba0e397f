"""The shapes that several APIs share: the parameters of a generation, and the parts of an answer.

Requests: null means absent, and unknown fields are ignored, because clients are newer than servers. A parameter that
cannot be served has a field here, so that it is refused instead of ignored. Answers: UNSET fields are left out.
"""

from typing import Annotated, Literal

from msgspec import UNSET, Meta, Raw, Struct, UnsetType

from ...ipc.messages import (
    MAX_ALLOWED_TOKENS,
    MAX_BAD_WORDS,
    MAX_BIASES,
    MAX_CHOICES,
    MAX_STOP_TOKENS,
    BadWord,
    StopString,
)

Probability = Annotated[float, Meta(ge=0.0, le=1.0)]


Penalty = Annotated[float, Meta(ge=-2.0, le=2.0)]


TokenId = Annotated[int, Meta(ge=0, le=2**31 - 1)]


StopStrings = Annotated[list[StopString], Meta(max_length=16)]


Bias = Annotated[float, Meta(ge=-100.0, le=100.0)]


FinishReason = Literal["stop", "length", "tool_calls", "function_call", "cache_threshold"]


# These stay JSON: the tokenizer process renders them. The schemas are for /openapi.json.
MessagesJson = Annotated[
    Raw, Meta(extra_json_schema={"type": "array", "items": {"$ref": "#/components/schemas/Message"}, "minItems": 1})
]


ToolsJson = Annotated[
    Raw, Meta(extra_json_schema={"type": ["array", "null"], "items": {"$ref": "#/components/schemas/Tool"}})
]


class StreamOptions(Struct, frozen=True):
    """What a stream has besides the text."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None  # every event has the usage of its choice so far; needs include_usage
    include_obfuscation: object = None  # ignored


JsonSchema = dict[str, object] | bool


class JsonSchemaFormat(Struct, frozen=True):
    """Enforced whether `strict` or not; the name and the description are ignored."""

    schema: JsonSchema | None = None
    name: str | None = None
    description: str | None = None
    strict: bool | None = None


class CustomFormat(Struct, frozen=True):
    """What the input of a custom tool looks like: any text, or a regular expression or a grammar."""

    type: Literal["text", "grammar"] = "text"
    syntax: Literal["lark", "regex"] | None = None
    definition: Annotated[str, Meta(max_length=1 << 18)] | None = None


class ResponseFormat(Struct, frozen=True):
    type: str
    json_schema: JsonSchemaFormat | None = None


class StructuredOutputs(Struct, frozen=True):
    """vLLM's: exactly one of the first five fields, and options for the whitespace of JSON."""

    json: JsonSchema | str | None = None  # a text holds the schema's JSON
    json_object: bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None  # Lark, or llama.cpp's GBNF
    disable_any_whitespace: bool | None = None
    whitespace_pattern: str | None = None
    disable_fallback: bool | None = None  # ignored: there is one implementation
    disable_additional_properties: bool | None = None  # ignored: always so unless a schema says otherwise

    # Refused.
    structural_tag: object = None


class GenerationRequest(Struct, frozen=True, kw_only=True):
    """What chat and completions have in common."""

    model: str | None = None
    n: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None
    temperature: Annotated[float, Meta(ge=0.0, le=2.0)] | None = None
    top_p: Annotated[float, Meta(gt=0.0, le=1.0)] | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    stop: StopString | StopStrings | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: Annotated[dict[TokenId, Bias], Meta(max_length=MAX_BIASES)] | None = None

    # vLLM's parameters, which clients send in extra_body.
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    min_p: Probability | None = None
    repetition_penalty: Annotated[float, Meta(gt=0.0, le=100.0)] | None = None
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=MAX_STOP_TOKENS)] | None = None
    ignore_eos: bool | None = None
    min_tokens: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None
    allowed_token_ids: Annotated[list[TokenId], Meta(min_length=1, max_length=MAX_ALLOWED_TOKENS)] | None = None
    truncate_prompt_tokens: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    truncation_side: Literal["left", "right"] | None = None  # which tokens of the prompt are left out; default: left
    prompt_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    use_beam_search: bool | None = None
    length_penalty: Annotated[float, Meta(ge=-10.0, le=10.0)] | None = None  # of a beam search, like early_stopping
    early_stopping: bool | None = None
    detokenize: bool | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None  # log-probabilities name tokens "token_id:5"
    return_timings: bool | None = None
    add_special_tokens: bool | None = None
    user: Annotated[str, Meta(max_length=512)] | None = None  # the user whose turn --scheduling-policy fair counts
    timeout: Annotated[float, Meta(ge=1.0, le=1e9)] | None = None  # seconds to wait for a start before failing
    priority: Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)] | None = None
    service_tier: Annotated[str, Meta(max_length=64)] | None = None  # a latency class; auto: that of the key
    cache_salt: Annotated[str, Meta(pattern=r"^[A-Za-z0-9_-]{1,64}$")] | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: JsonSchema | str | None = None  # vLLM's former name of structured_outputs.json, and so on
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    guided_whitespace_pattern: str | None = None
    regex: str | None = None  # SGLang's names of structured_outputs.regex and .grammar
    ebnf: str | None = None
    grammar: str | None = None  # llama.cpp's names of structured_outputs.grammar and .json
    json_schema: JsonSchema | str | None = None
    thinking_token_budget: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None  # -1: no bound
    thinking_budget: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None  # another name for it
    bad_words: Annotated[list[BadWord], Meta(max_length=MAX_BAD_WORDS)] | None = None

    kv_transfer_params: dict[str, object] | None = None  # of a proxy in front of prefill and decode engines
    cache_hit_threshold: Probability | None = None  # of the prompt in caches; else it ends with `cache_threshold`
    vllm_xargs: dict[str, object] | None = None  # arguments for the runner plugin

    # Ignored: they do not change the answer.
    metadata: object = None
    moderation: object = None
    prediction: object = None
    prompt_cache_key: object = None
    prompt_cache_options: object = None
    prompt_cache_retention: object = None
    request_id: object = None
    safety_identifier: object = None
    session_id: object = None
    spaces_between_special_tokens: object = None
    store: object = None
    stream_interval: object = None

    # Refused: ignoring them would give another answer than the client asked for.
    logits_processors: object = None
    prompt_embeds: object = None
    ec_transfer_params: object = None
    bootstrap_host: object = None
    bootstrap_port: object = None
    bootstrap_room: object = None
    guided_decoding_backend: object = None
    logprob_token_ids: object = None
    repetition_detection: object = None
    return_prompt_text: object = None
    return_token_offsets: object = None
    watermarking: object = None


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
    """Where the time of a request went, in ms. Parts that it did not reach are left out; the others add up."""

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
    rank: int | None  # 1: the best; null: not among the top ones
    decoded_token: str


PromptLogprobs = list[dict[int, PromptLogprobBody] | None]
"""By position: id → candidate; null for the first."""


class TextFormat(Struct, frozen=True):
    """`response_format` as /v1/responses and /v1/messages have it."""

    type: str = "text"
    name: str | UnsetType = UNSET
    schema: dict[str, object] | UnsetType = UNSET
    strict: bool | UnsetType | None = UNSET
    description: str | UnsetType | None = UNSET

    def as_response_format(self) -> ResponseFormat:
        """The same in chat's shape."""
        return ResponseFormat(self.type, JsonSchemaFormat(None if self.schema is UNSET else self.schema))
