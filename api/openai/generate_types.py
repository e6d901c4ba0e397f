"""The bodies of /inference/v1/generate and of the render endpoints, which answer with the same shape: vLLM's
token-in token-out protocol, as llm-d's coordinator writes and reads it."""

from typing import Annotated, Literal

from msgspec import UNSET, Meta, Struct, UnsetType

from ...ipc.messages import (
    MAX_ALLOWED_TOKENS,
    MAX_BAD_WORDS,
    MAX_BIASES,
    MAX_CHOICES,
    MAX_STOP_TOKENS,
    BadWord,
    StopString,
)
from ..output.shapes import (
    Bias,
    FinishReason,
    Penalty,
    Probability,
    PromptLogprobs,
    StopStrings,
    StreamOptions,
    StructuredOutputs,
    TokenId,
    UsageBody,
)
from .kv_transfer import TransferAnswer

OutputMode = Literal["tokens", "text"]


class GenerateSampling(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """`sampling_params`, with the names and meanings that chat and completions have as well."""

    n: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] | None = None
    max_tokens: Annotated[int, Meta(ge=1, le=2**31 - 1)] | None = None  # default: the rest of the context
    min_tokens: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None
    temperature: Annotated[float, Meta(ge=0.0, le=2.0)] | None = None
    top_p: Annotated[float, Meta(gt=0.0, le=1.0)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    min_p: Probability | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    stop: StopString | StopStrings | None = None
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=MAX_STOP_TOKENS)] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Meta(gt=0.0, le=100.0)] | None = None
    logit_bias: Annotated[dict[TokenId, Bias], Meta(max_length=MAX_BIASES)] | None = None
    allowed_token_ids: Annotated[list[TokenId], Meta(min_length=1, max_length=MAX_ALLOWED_TOKENS)] | None = None
    bad_words: Annotated[list[BadWord], Meta(max_length=MAX_BAD_WORDS)] | None = None
    logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    prompt_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    detokenize: bool | None = None
    skip_special_tokens: bool | None = None
    structured_outputs: StructuredOutputs | None = None
    extra_args: dict[str, object] | None = None  # `kv_transfer_params`, and arguments for the runner plugin

    # Refused.
    logits_processors: object = None


class GenerateRequest(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """POST /inference/v1/generate: continue these tokens. The render endpoints answer with such requests."""

    token_ids: Annotated[list[TokenId], Meta(min_length=1)]
    sampling_params: GenerateSampling = GenerateSampling()
    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    cache_salt: Annotated[str, Meta(pattern=r"^[A-Za-z0-9_-]{1,64}$")] | None = None
    priority: Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)] | None = None
    request_id: Annotated[str, Meta(min_length=1, max_length=256)] | None = None
    output_mode: OutputMode | None = None  # default: tokens
    return_token_ids: bool | None = None
    kv_transfer_params: dict[str, object] | None = None
    cache_hit_threshold: Probability | None = None

    # Refused.
    features: object = None
    content_parts: object = None
    ec_transfer_params: object = None


class GenerateCandidate(Struct, frozen=True):
    """A token by its id, or with `output_mode` text by its text."""

    logprob: float
    token_id: int | UnsetType = UNSET
    rank: int | UnsetType | None = UNSET  # with `token_id`; 1: the best; null: not among the best ones
    token: str | UnsetType = UNSET
    bytes: list[int] | UnsetType = UNSET  # with `token`


class GenerateLogprob(GenerateCandidate, frozen=True, kw_only=True):
    """A sampled token and the best candidates. By id, it comes first among them, and the others follow by rank."""

    top_logprobs: list[GenerateCandidate]


class GenerateLogprobs(Struct, frozen=True):
    content: list[GenerateLogprob]  # one for each token


class GenerateChoice(Struct, frozen=True):
    """A choice of a plain answer or a stream, where `finish_reason` is null until the last chunk."""

    index: int
    token_ids: list[int]
    finish_reason: FinishReason | None
    stop_reason: str | int | None
    logprobs: GenerateLogprobs | None = None
    text: str | UnsetType = UNSET  # with `output_mode` text


class GenerateAnswer(Struct, frozen=True):
    """The whole answer, or one event of a stream."""

    request_id: str
    choices: list[GenerateChoice]
    output_mode: OutputMode
    model: str | UnsetType = UNSET
    created: int | UnsetType = UNSET
    usage: UsageBody | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    kv_transfer_params: TransferAnswer | UnsetType = UNSET  # of a prefill leg, not streamed
