"""The bodies of llama-server's own endpoints. The rules are those of `api/openai/types.py`, and of `sampling.py`."""

from typing import Annotated, Literal

from msgspec import UNSET, Meta, Struct, UnsetType

from ..output.shapes import JsonSchema, TokenId
from .sampling import SamplingOptions

# ── requests ─────────────────────────────────────────────────────────────────────────────────────────────────────────


class TextRequest(SamplingOptions, frozen=True, kw_only=True):
    """What completion and infill have in common."""

    model: str | None = None
    stream: bool | None = None
    n_predict: Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)] | None = None  # less than 0: as many as fit
    max_tokens: Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)] | None = None  # another name for it
    grammar: str | None = None  # GBNF
    json_schema: JsonSchema | None = None
    n_probs: Annotated[int, Meta(ge=0, le=20)] | None = None
    ignore_eos: bool | None = None
    logit_bias: list[list[int | float | bool]] | dict[TokenId, float] | None = None  # [id, bias]; false: never
    return_tokens: bool | None = None

    # Ignored: they configure llama.cpp, or switch parts of the answer.
    cache_prompt: object = None
    id_slot: object = None
    n_keep: object = None
    n_discard: object = None
    n_indent: object = None
    t_max_predict_ms: object = None
    t_max_prompt_ms: object = None
    samplers: object = None
    timings_per_token: object = None
    return_progress: object = None
    post_sampling_probs: object = None
    response_fields: object = None
    min_keep: object = None
    mirostat_tau: object = None
    mirostat_eta: object = None
    dynatemp_exponent: object = None
    xtc_threshold: object = None
    dry_base: object = None
    dry_allowed_length: object = None
    dry_penalty_last_n: object = None
    dry_sequence_breakers: object = None

    # Refused.
    lora: object = None
    image_data: object = None


class LlamaCompletionRequest(TextRequest, frozen=True, kw_only=True):
    """POST /completion. `prompt`: a text, or a list of token ids."""

    prompt: str | list[TokenId]


class ExtraFile(Struct, frozen=True):
    text: str
    filename: str = ""


class InfillRequest(TextRequest, frozen=True, kw_only=True):
    """POST /infill"""

    input_prefix: str | None = None
    input_suffix: str | None = None
    input_extra: list[ExtraFile] | None = None
    prompt: str | None = None  # what the output begins with


# ── answers ──────────────────────────────────────────────────────────────────────────────────────────────────────────

StopType = Literal["none", "eos", "limit", "word"]


class Candidate(Struct, frozen=True):
    id: int
    token: str
    bytes: list[int]
    logprob: float


class TokenProbability(Struct, frozen=True):
    id: int
    token: str
    bytes: list[int]
    logprob: float
    top_logprobs: list[Candidate]


class Timings(Struct, frozen=True):
    prompt_n: int
    prompt_ms: float
    prompt_per_second: float
    predicted_n: int
    predicted_ms: float
    predicted_per_second: float
    cache_n: int


class CompletionPart(Struct, frozen=True, kw_only=True):
    """An event of a stream, the last of which has what follows `stop`; or the plain answer."""

    index: int = 0
    content: str
    tokens: list[int]
    stop: bool = False
    id_slot: int = -1
    tokens_predicted: int
    tokens_evaluated: int
    completion_probabilities: list[TokenProbability] | UnsetType = UNSET
    model: str | UnsetType = UNSET
    stop_type: StopType | UnsetType = UNSET
    stopping_word: str | UnsetType = UNSET
    truncated: bool | UnsetType = UNSET
    has_new_line: bool | UnsetType = UNSET
    tokens_cached: int | UnsetType = UNSET
    timings: Timings | UnsetType = UNSET


class DefaultSettings(Struct, frozen=True):
    n_ctx: int
    params: dict[str, float]


class Modalities(Struct, frozen=True):
    vision: bool = False
    audio: bool = False


class Props(Struct, frozen=True):
    default_generation_settings: DefaultSettings
    total_slots: int
    model_path: str
    model_alias: str
    chat_template: str
    bos_token: str
    eos_token: str
    build_info: str
    modalities: Modalities = Modalities()
    is_sleeping: bool = False


class Slot(Struct, frozen=True):
    id: int
    n_ctx: int
    is_processing: bool
