"""Every message of the pipeline, in pipeline order.

A message is a fact: frozen, complete, and encoded as a msgpack array (`array_like`), so fields are only ever appended.
Columns of integers travel as the bytes of little-endian int32 (`ids_to_bytes`), never as lists: an 8k-token prompt then
decodes in a microsecond. `SCHEMA_VERSION` changes with every change here; both ends compare it in `Ready`.

    api ─Submit, Cancel─▶ tokenizer ─Enqueue, Cancel─▶ core ═StepPlan▶ worker ═StepResult, Transferred▶ core
    core ─Opened, TokenBatch─▶ detokenizer ─TextBatch─▶ api          detokenizer ─StopHit─▶ core
    tokenizer, core ─Accepted, Failed, Snapshot, Pulse─▶ api         all ─Ready, Fault, Pong─▶ supervisor
    api ─Tokenize, Detokenize, Describe─▶ tokenizer ─Tokenized, Detokenized, Described─▶ api
    core ─Constrain, Sampled─▶ grammar ─Constrained, Masks─▶ core ─LateMasks─▶ worker
    core ─Constrain, Sampled─▶ grammar ─Constrained, Masks─▶ core
    worker ─Hidden─▶ worker of the next stage        worker of the last stage ─SampledIds─▶ worker of the first
    supervisor ─Ping, Reset, Settings, Leave, Stop─▶ all
    supervisor ─Serve, Restored, Swapped, Vacate, ModelStates, Replaced─▶ api
    api ─Swap, Change, Vacated, Demand─▶ supervisor

`rid` is an unsigned 63-bit number: the api process's index in the high bits, a counter below. One rid is one sequence
(one choice of one prompt). Exactly one terminal message ends it: a `Tokens` or `Chunk` with `finish`, or a `Failed`.
"""

import math
from array import array
from collections.abc import Iterator
from typing import Annotated, Literal

from msgspec import Meta, Struct

from ..config.config import EngineConfig, HttpConfig
from ..errors import ErrorKind
from .reports import HistogramCounts

SCHEMA_VERSION = 21

RID_BITS = 40  # of a rid: the counter; above it the api process's index

FinishReason = Literal["stop", "length", "abort", "cache_threshold"]
"""Why a sequence ended: an eos or stop token or a stop string; a length limit; cancelled by its client; too little of
its prompt was found in caches (`Enqueue.cache_hit_threshold`)."""


def ids_to_bytes(ids: "list[int] | array[int]") -> bytes:
    """Little-endian int32 bytes of token ids, block ids or rows."""
    return (ids if isinstance(ids, array) else array("i", ids)).tobytes()


def bytes_to_ids(data: bytes) -> "array[int]":
    """The inverse of `ids_to_bytes`, as `array('i')`. Raises ValueError if `data` is not int32s."""
    ids = array("i")
    ids.frombytes(data)
    return ids


# ── prompts and vectors ───────────────────────────────────────────────────────────────────────────────────────────────


class TextPrompt(Struct, frozen=True, array_like=True, tag="text"):
    """A plain prompt. Special tokens written in it are parsed, so that a client may send a rendered conversation."""

    text: str
    add_special_tokens: bool = True  # those that the tokenizer adds, such as BOS


class ChatPrompt(Struct, frozen=True, array_like=True, tag="chat"):
    """A conversation for the chat template. The first three fields are JSON as the client sent it."""

    messages: bytes  # a JSON array of message objects
    tools: bytes = b""  # a JSON array of tool definitions, or nothing
    template_kwargs: bytes = b""  # a JSON object of extra template variables, or nothing
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    template: str = ""  # replaces the model's (--trust-request-chat-template)
    add_special_tokens: bool = False  # those that the tokenizer adds to a text, besides those that the template writes


class IdsPrompt(Struct, frozen=True, array_like=True, tag="ids"):
    """Token ids, int32. The tokenizer process checks them against the vocabulary."""

    ids: bytes


class PairPrompt(Struct, frozen=True, array_like=True, tag="pair"):
    """Two texts to compare, which the tokenizer joins in the model's format."""

    first: str
    second: str


class Pooling(Struct, frozen=True, array_like=True):
    """Asks for a vector of the prompt, or of each of its tokens, instead of new tokens."""

    how: Literal[
        "last", "mean", "cls", "all", "score"
    ]  # cls: of the first token; score: the output of the classification head
    is_normalized: bool = False  # to length 1
    dimensions: Annotated[int, Meta(ge=1)] | None = None  # keep this many leading numbers, before normalizing
    truncate: Annotated[int, Meta(ge=1)] | None = None  # keep this many leading tokens of the prompt


# ── constraints ───────────────────────────────────────────────────────────────────────────────────────────────────────


MAX_GRAMMAR_BYTES = 1 << 18  # of `Constraint.text`
MAX_BAD_SEQUENCES = 2048  # a bad word at the start of a text and after a space
_Mark = Annotated[str, Meta(max_length=256)]


class Source(Struct, frozen=True, array_like=True):
    """The field of the client's request that a part of a constraint's text comes from."""

    field: _Mark  # as errors name it, such as tools[3].function.parameters
    tool: _Mark = ""  # the function whose parameters it describes
    instead: _Mark = ""  # JSON schema enforced if this one cannot be; "": the request is refused


class Constraint(Struct, frozen=True, array_like=True):
    """What an output must follow. The grammar process compiles it and computes the masks."""

    kind: Literal["none", "json_schema", "json_object", "regex", "choice", "lark"] = (
        "none"  # none: only the fields below
    )
    # the schema as JSON, the pattern, the choices as a JSON list, the grammar
    text: Annotated[str, Meta(max_length=MAX_GRAMMAR_BYTES)] = ""
    # the grammar applies after the first of these; (): from the start
    reasoning_ends: Annotated[tuple[_Mark, ...], Meta(max_length=16)] = ()
    # tags that open reasoning in an output; the prompt may have opened it already
    reasoning_starts: Annotated[tuple[_Mark, ...], Meta(max_length=16)] = ()
    thinking_budget: Annotated[int, Meta(ge=0)] | None = None  # after so many tokens the end of reasoning is forced
    # int32 ids of each sequence that must not appear
    bad_words: Annotated[tuple[Annotated[bytes, Meta(max_length=8192)], ...], Meta(max_length=MAX_BAD_SEQUENCES)] = ()
    lark_marks: tuple[str, ...] = ()  # lark: the texts of its rules mark0, mark1 …; else: the text that comes first
    sources: tuple[Source, ...] = ()  # of `text`; with `lark_marks` of a lark text: of each line's schema, in order


# ── the parameters of a request ──────────────────────────────────────────────────────────────────────────────────────


MAX_CHOICES = 128  # of one prompt
MAX_BIASES = 1024  # of a request; the size of a row's table on a GPU
MAX_STOP_TOKENS = 1024
MAX_ALLOWED_TOKENS = 4096
MAX_BAD_WORDS = 1024
MAX_EXTRA_BYTES = 1 << 14  # of a request's arguments for the runner plugin
BadWord = Annotated[str, Meta(min_length=1, max_length=256)]
StopString = Annotated[str, Meta(min_length=1, max_length=4096)]


class Sampling(Struct, frozen=True, array_like=True):
    """How the next token is sampled. Every decoder that reads it checks the bounds and refuses NaN and infinity."""

    temperature: Annotated[float, Meta(ge=0.0, le=100.0)] = 1.0  # 0: greedy
    top_k: Annotated[int, Meta(ge=0, le=2**31 - 1)] = 0  # 0: off
    top_p: Annotated[float, Meta(gt=0.0, le=1.0)] = 1.0
    min_p: Annotated[float, Meta(ge=0.0, le=1.0)] = 0.0
    repetition_penalty: Annotated[float, Meta(gt=0.0, le=100.0)] = 1.0  # over prompt and output
    presence_penalty: Annotated[float, Meta(ge=-2.0, le=2.0)] = 0.0  # over output
    frequency_penalty: Annotated[float, Meta(ge=-2.0, le=2.0)] = 0.0  # over output
    logit_bias: dict[int, float] | None = None  # token id → added to its logit; at most MAX_BIASES
    seed: Annotated[int, Meta(ge=0, le=2**63 - 1)] = 0  # noise is keyed by (seed, output position)
    logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None  # n: those of the sampled token and of the n best
    prompt_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None  # the same for every prompt position but the first
    allowed_token_ids: Annotated[tuple[int, ...], Meta(max_length=MAX_ALLOWED_TOKENS)] = ()  # (): all tokens
    # a JSON object for the runner plugin; empty: none
    extra_args: Annotated[bytes, Meta(max_length=MAX_EXTRA_BYTES)] = b""

    def __post_init__(self) -> None:
        numbers = (
            self.temperature,
            self.top_p,
            self.min_p,
            self.repetition_penalty,
            self.presence_penalty,
            self.frequency_penalty,
        )
        if not all(map(math.isfinite, numbers)):
            raise ValueError("sampling parameters must be finite numbers")
        if self.logit_bias and not all(k >= 0 and math.isfinite(v) for k, v in self.logit_bias.items()):
            raise ValueError("logit_bias must map token ids to finite numbers")
        if self.logit_bias and len(self.logit_bias) > MAX_BIASES:
            raise ValueError(f"logit_bias may name at most {MAX_BIASES} tokens")


class Limits(Struct, frozen=True, array_like=True):
    """When the core ends a sequence by itself."""

    max_tokens: Annotated[int, Meta(ge=0)] | None = None  # None: to the end of the context; 0: score the prompt only
    stop_token_ids: Annotated[tuple[int, ...], Meta(max_length=MAX_STOP_TOKENS)] = ()  # besides the model's own eos ids
    ignore_eos: bool = False
    queue_timeout_s: Annotated[float, Meta(gt=0.0, le=1e9)] | None = None  # the longest wait for a row
    min_tokens: Annotated[int, Meta(ge=0)] = 0  # before this many tokens no eos or stop token is sampled


class TextSpec(Struct, frozen=True, array_like=True):
    """What the detokenizer does with a sequence's ids. The core passes it on unread."""

    stop: Annotated[tuple[StopString, ...], Meta(max_length=16)] = ()
    include_stop: bool = False  # keep the matched stop string in the text
    skip_special_tokens: bool = True
    detokenize: bool = True  # False: ids only, `Chunk.text` stays empty
    prompt: bool = False  # send the prompt's ids and text back in the first `Chunk` (echo, return_token_ids)
    marks: tuple[str, ...] = ()  # special tokens to show although others are skipped
    prompt_end: bool = False  # send the text of the prompt's last ids, special tokens included, in the first `Chunk`
    min_tokens: int = 0  # a stop string that is complete before this many tokens does not stop


class Times(Struct, frozen=True, array_like=True):
    """Times of one sequence, in seconds of the machine's monotonic clock; 0: unknown.

    Processes of one machine share that clock. Between machines the times are wrong by the difference of the clocks."""

    taken: float = 0.0  # the tokenizer began
    tokenized: float = 0.0  # the tokenizer was done
    started: float = 0.0  # its first step was planned
    num_cached: int = 0  # prompt tokens found in the prefix cache then
    num_chars: int = 0  # of the prompt, where the tokenizer looked for pieces that it knows
    num_known_chars: int = 0  # of such pieces


# ── api → tokenizer → core ───────────────────────────────────────────────────────────────────────────────────────────


class Submit(Struct, frozen=True, array_like=True, tag=True):
    """api → tokenizer: `n` sequences of one prompt, with rids `rid` … `rid + n - 1` and seeds `seed + i`."""

    rid: int
    n: Annotated[int, Meta(ge=1, le=MAX_CHOICES)]
    prompt: TextPrompt | ChatPrompt | IdsPrompt | PairPrompt
    sampling: Sampling
    limits: Limits
    text: TextSpec
    priority: int = 0  # lower is served first
    salt: bytes = b""  # keeps prefix-cache entries of different owners apart
    tenant: str = ""  # for the policy `fair`: the API key's digest, else the `user` of the request
    truncate: Annotated[int, Meta(ge=-1)] | None = None  # keep this many last tokens of the prompt; -1: as many as fit
    constraint: Constraint | None = None
    bad_words: Annotated[tuple[BadWord, ...], Meta(max_length=MAX_BAD_WORDS)] = ()  # not in the output
    pooling: Pooling | None = None  # with n = 1 and max_tokens = 0; the answer is `Chunk.vector`
    resume_ids: bytes = b""  # this and the next two: as in `Enqueue`
    resume_chars: Annotated[int, Meta(ge=-1)] = 0
    attempt: int = 0
    cache_salt: str = ""  # this and the next two: as in `Enqueue`
    awaits_kv: bool = False
    cache_hit_threshold: Annotated[float, Meta(ge=0.0, le=1.0)] | None = None
    kv_peer: str = ""  # as in `Enqueue`
    keeps_start: bool = False  # `truncate` keeps the first tokens instead
    latency_class: str = ""  # as in `Enqueue`


class Enqueue(Struct, frozen=True, array_like=True, tag=True):
    """tokenizer → core: `n` sequences of one prompt, tokenized and checked against the context length.

    Their rids are `rid` … `rid + n - 1`, their seeds `seed + i`. `resume_ids`: output that the client received before a
    process died; generation continues after it (only with n = 1).
    """

    rid: int
    prompt_ids: bytes
    sampling: Sampling
    limits: Limits
    text: TextSpec
    priority: int = 0
    salt: bytes = b""
    tenant: str = ""
    n: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] = 1
    resume_ids: bytes = b""
    constraint: Constraint | None = None
    times: Times = Times()  # until now
    pooling: Pooling | None = None
    type_ids: bytes = b""  # uint8, parallel to prompt_ids: which text of a pair a token belongs to; empty: no pair
    resume_chars: Annotated[int, Meta(ge=-1)] = 0  # characters delivered of `resume_ids`; -1: repeat them all
    attempt: int = 0  # submissions before this one; a sequence accepted before is not refused for a full queue
    # How many leading tokens of the prompt later prompts are likely to share: where a recurrent state is worth keeping.
    marks: tuple[Annotated[int, Meta(ge=0)], ...] = ()
    cache_salt: str = ""  # what the client calls its part of `salt`; routers are told of it
    awaits_kv: bool = False  # another engine computes the prompt and may not have begun: wait a while for its KV
    # It ends with `cache_threshold`, computing nothing, if a smaller share of its prompt is found in caches.
    cache_hit_threshold: Annotated[float, Meta(ge=0.0, le=1.0)] | None = None
    kv_peer: str = ""  # tcp:// address of the engine that has or computes its KV; empty: the operator's peer
    latency_class: str = ""  # one of `--latency-classes`; empty: the default one


class Tokenize(Struct, frozen=True, array_like=True, tag=True):
    """api → tokenizer: asks for the ids of a prompt. `Tokenized` or `Failed` answers; nothing is generated."""

    rid: int
    prompt: TextPrompt | ChatPrompt
    pieces: bool = False  # send the text of each token back, too


class Detokenize(Struct, frozen=True, array_like=True, tag=True):
    """api → tokenizer: asks for the text of ids. `Detokenized` or `Failed` answers."""

    rid: int
    ids: bytes  # int32
    skip_special_tokens: bool = False


class Describe(Struct, frozen=True, array_like=True, tag=True):
    """api → tokenizer: asks for the special tokens and the chat template. `Described` answers."""

    rid: int


class Cancel(Struct, frozen=True, array_like=True, tag=True):
    """api → tokenizer → core: end these sequences. Takes the path of their `Submit`, so it never overtakes it."""

    rids: tuple[int, ...]


# ── core ⇄ worker ────────────────────────────────────────────────────────────────────────────────────────────────────


class GroupShape(Struct, frozen=True, array_like=True):
    """A cache group: what a row keeps of the layers whose cache lives equally long."""

    kind: Literal["full", "window", "chunk", "state", "cross"]  # cross: of the encoder's result
    span: Annotated[int, Meta(ge=0)]  # positions of a window or a chunk; 0 for the other kinds
    pages: Annotated[int, Meta(ge=1)]  # of a block; of a state


class PassReads(Struct, frozen=True, array_like=True):
    """Bytes of its weights that a rank reads in a step."""

    fixed: int = 0  # whatever the step computes: all but experts, and tables of which it reads some rows
    experts: int = 0  # of all its experts, of which a step reads those that its tokens choose
    expert_share: float = 0.0  # of the experts of a layer, that one token chooses


class CacheOffer(Struct, frozen=True, array_like=True, tag=True):
    """worker → core: how much cache memory this rank has room for.

    Memory is pages of equal size. A block of a group is `GroupShape.pages` of them; a group `state` comes last. Ranks
    agree on the groups, but not on the size of a page. Without `groups` the model has one full group, and each of the
    `num_blocks` blocks is a page."""

    rank: int
    num_blocks: int
    block_bytes: int = 0
    page_bytes: int = 0
    num_pages: int = 0
    groups: tuple[GroupShape, ...] = ()
    failed_kernels: tuple[str, ...] = ()  # that slower ones replace
    keys_by_args: bool = False  # only requests with equal `Sampling.extra_args` may share KV
    reads: PassReads = PassReads()


class OpenCache(Struct, frozen=True, array_like=True, tag=True):
    """core → worker: allocate exactly this much cache memory."""

    num_blocks: int  # pages, if the `CacheOffer` had groups
    rank_bytes: tuple[int, ...] = ()  # of a page on each rank, by rank
    hosts: tuple[str, ...] = ()  # as `ConnectorFacts.hosts`


class GroupTable(Struct, frozen=True, array_like=True):
    """The block table of a row in one group."""

    first: int  # the blocks before this one are not in the table: no position to come reads them
    pages: bytes  # int32 [blocks × pages of a block], in the order of the positions


class RowOpen(Struct, frozen=True, array_like=True):
    """A sequence takes a row of the worker, which forgets what the row held before."""

    row: int
    ids: bytes  # prompt and, after a preemption, the output so far
    num_prompt: int  # the output starts at this position; output position = position - num_prompt
    num_computed: int  # leading positions whose KV is in the blocks already (prefix hit)
    block_ids: bytes  # the row's block table so far, hits first; empty if the `CacheOffer` had groups
    sampling: Sampling
    min_len: int = 0  # while the row has fewer ids, none of `ends` is sampled
    ends: bytes = b""  # int32, at most MAX_BIASES together with those of `logit_bias`
    pooling: Pooling | None = None  # the step that computes the last position of the prompt returns a vector
    type_ids: bytes = b""  # as in `Enqueue`
    tables: tuple[GroupTable, ...] = ()  # of each group but `cross` and `state`, if the `CacheOffer` had groups
    state: bytes = b""  # int32, the pages in which its passes keep the row's recurrent state
    state_from: bytes = b""  # int32, the pages that hold it after `num_computed` positions; empty: it is zero
    regime: int = 0  # 1: all its positions are computed as those of sequences beyond the model's `regime_limit`
    rid: int = 0  # of the sequence, for the runner plugin
    # Of a model with an encoder: int32 pages of the group `cross`, how many tokens of the prompt they are for, and the
    # ids of the prompt if the encoder is to read it before the plan's pass, else the pages hold its result.
    cross: bytes = b""
    num_encoded: int = 0
    encoder_ids: bytes = b""


class StepPlan(Struct, frozen=True, array_like=True, tag=True):
    """core → worker: one forward pass, as a diff against what the rows hold, in columns.

    Applied in this order: `open`, then `grow` (append a block to a row's table), then `kv` (the KV
    connector first reads the blocks that it saves, then writes those that it loads), then `copies`, then the pass over
    `rows`. Row `rows[i]` computes its next `counts[i]` positions and, if `sample[i]` is 1, samples one token, which
    becomes the id of the position after them. The worker keeps the ids, so the core plans a decode row before it knows
    the row's last id. A plan may have no rows.

    The worker is not told when the blocks behind a window or a chunk are released. To compute position p of a row, it
    reads positions from max(0, p - span + 1) on in a window group and from ⌊p / span⌋ · span on in a chunk group.

    The first `num_speculative` rows have count 1 and sample 1 and may compute up to `speculate` positions
    more, those of draft tokens, which the worker proposes from the row's own ids. A draft token is accepted if it is
    the token sampled at its position. Such a row samples one token for each accepted draft token and one more; its
    blocks have room for all positions that it may compute. The next plan continues where the worker is.
    """

    step: int
    open: tuple[RowOpen, ...]
    grow_rows: bytes  # int32, parallel to grow_blocks; a row may appear several times
    grow_blocks: bytes  # int32, the pages of one block for each entry of grow_rows
    rows: bytes  # int32, each row at most once
    counts: bytes  # int32, ≥ 1
    sample: bytes  # uint8, 0 or 1
    copies: bytes = b""  # int32 pairs (from page, to page); all are read before any is written
    kv: bytes = b""  # metadata for the worker half of the KV connector; empty: nothing to do
    extension: bytes = b""  # of a plan extension, for the attention backend that it wraps
    num_speculative: int = 0
    speculate: int = 0
    break_even: float = 0.5  # the share of draft tokens, 0 to 1, that must be accepted for speculation to pay
    masked_rows: bytes = b""  # int32, the rows whose sampling `masks` restricts
    masks: bytes = b""  # int32 [masked_rows × ⌈vocab / 32⌉], as `Masks.bits`
    after_fault: bool = False  # the core has applied the last `StepResult.fault`; this plan is free of that step
    grow_groups: bytes = b""  # int32, parallel to grow_rows; empty: all are group 0
    # Besides, the pass stores the recurrent state of a row after this many positions, one of those that it computes,
    # in the pages of a state.
    keep_rows: bytes = b""  # int32; a row may appear several times
    keep_positions: bytes = b""  # int32, parallel to keep_rows
    keep_pages: bytes = b""  # int32
    late_rows: bytes = b""  # int32, rows that sample: `LateMasks` says for each of them what, while the pass runs
    # With KV domains, of which each gets a plan of its own for the step: the sum of `counts` in the plan of each.
    domain_tokens: tuple[int, ...] = ()
    domain_longest: int = 0  # and the greatest of all these `counts`


class LateMasks(Struct, frozen=True, array_like=True, tag=True):
    """core → worker: what some `late_rows` of a plan may sample. Each of these rows is in one such message, which comes
    after its plan. The worker samples a plan's tokens, and begins the pass of the next plan, when it has all of them.
    Those of plans that it has dropped it ignores."""

    step: int
    rows: bytes  # int32, restricted to their `bits`
    bits: bytes  # int32 [rows × ⌈vocab / 32⌉], as `Masks.bits`
    free: bytes = b""  # int32, rows that may sample any token, or whose token does not count any more


class RowLogprobs(Struct, frozen=True, array_like=True):
    """Log-probabilities of consecutive positions of one row: `width` entries each, the chosen token's first."""

    width: int
    ids: bytes  # int32 [positions × width]
    values: bytes  # float32 [positions × width], natural log, never NaN


class RowFailure(Struct, frozen=True, array_like=True):
    """Why the runner plugin failed a row's request."""

    kind: ErrorKind
    detail: str  # one sentence for the client


class StepResult(Struct, frozen=True, array_like=True, tag=True):
    """worker → core: the results of a plan's pass, in the plan's order.

    With `fault` there are none: rows that the plan opened are closed, and positions that it would have computed have no
    KV. The worker answers the following plans in the same way, without a pass, until one has `after_fault`. A plan's
    `kv` is carried out in any case."""

    step: int
    ids: bytes  # int32, sampled, of each row with sample = 1; -1: its logits were not finite, fail that sequence
    logprobs: dict[int, RowLogprobs]  # index into the plan's rows → the sampled token's
    prompt_logprobs: dict[int, RowLogprobs]  # index into the plan's rows → those of the prompt positions it computed
    device_ms: float
    num_sampled: bytes = b""  # int32, how many of `ids` belong to each row with sample = 1; empty: one each
    num_drafts: int = 0  # rows that computed draft tokens
    num_draft_tokens: int = 0
    vectors: dict[int, bytes] = {}  # index into the plan's rows → float32; empty: not finite, fail that sequence
    fault: Literal["out_of_memory"] | None = None
    mask_wait_ms: float = 0.0  # that the pass waited for `LateMasks` before it sampled; not part of `device_ms`
    domain: int = 0  # whose plan it was
    failed: dict[int, RowFailure] = {}  # index into the plan's rows → why its request fails; the others count
    num_failed_calls: int = 0  # of the runner plugin, since the last result
    num_slow_calls: int = 0


class Hidden(Struct, frozen=True, array_like=True, tag=True):
    """worker → the worker with its number in the next stage: a plan's pass up to there.

    Stages compute the layers of a model one after the other, and each gets all plans from the core. A stage after the
    first runs a plan when this is there. With `fault` it has no data, and the receiver runs no pass; see `StepResult`.
    """

    step: int
    device_ms: float = 0.0  # of the slowest stage so far
    starts: bytes = b""  # int32 [plan's rows]: the first position of each; empty: no step has draft tokens
    num_drafts: bytes = b""  # int32 [num_speculative]: draft tokens of each row; empty: there are none
    draft_ids: bytes = b""  # int32, those of all rows
    width: int = 0  # columns of `data`
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    fault: Literal["out_of_memory"] | None = None
    data: bytes = b""  # [tokens × width]; a frame of its own behind the message, which is sent without it
    num_tokens: int = 0  # instead of `data`, if it lies in memory that both workers share


class SampledIds(Struct, frozen=True, array_like=True, tag=True):
    """worker of the last stage → the worker with its number in the first stage: what a step sampled.

    Of each step with sampling rows, sent before its `StepResult`. The first stage runs a plan when the ids of all its
    rows are there. With `fault` there are none, and it runs no pass until a plan has `after_fault`."""

    step: int
    ids: bytes  # as in `StepResult`, and the next two as well
    num_sampled: bytes = b""
    fault: Literal["out_of_memory"] | None = None


class Transferred(Struct, frozen=True, array_like=True, tag=True):
    """worker → core: KV transfers of earlier plans that have ended on this rank. Sent after the step that finished
    them. One has ended for the core when it has on every rank."""

    loaded: tuple[int, ...]  # rids whose load has ended, successful or not
    failed_blocks: bytes  # int32: of those loads, the blocks that could not be filled
    sent: tuple[int, ...]  # ended rids whose blocks the connector no longer needs
    num_blocks: int = 0  # loaded
    load_ms: float = 0.0  # spent loading them
    rank: int = 0


class ExpertLoad(Struct, frozen=True, array_like=True, tag=True):
    """worker → core: which experts tokens chose since the rank's last report. Sent by every rank after each 1,000 steps
    and when it becomes idle, if ranks have whole experts."""

    rank: int
    num_steps: int  # that the rank has run so far
    tokens: dict[int, bytes]  # layer → int64, for each of its experts the tokens that it had on this rank
    sent_bytes: int = 0  # that other ranks have read from this one


class ReadExperts(Struct, frozen=True, array_like=True, tag=True):
    """core → workers: the ranks read what they lack of these experts of a layer, while steps go on. Each says in its
    `WorkerUsage` when it has. What was read before is dropped."""

    number: int  # of this message, from 1
    layer: int
    slots: tuple[tuple[int, ...], ...]  # of each rank: the expert of each slot; -1: none


class ExpertsRead(Struct, frozen=True, array_like=True):
    """What came of a `ReadExperts`."""

    number: int
    problem: str = ""  # why the rank could not read them


class PlaceExperts(Struct, frozen=True, array_like=True, tag=True):
    """core → workers, to all between the same two plans, once all have read these experts: from the next plan on the
    ranks have them."""

    layer: int
    slots: tuple[tuple[int, ...], ...]  # as in `ReadExperts`


class ProcessUsage(Struct, frozen=True, array_like=True):
    """What a process takes of its machine, as the system counts it; all 0: unknown."""

    cpu_s: float = 0.0  # processor time of all its threads since its start
    num_threads: int = 0
    anonymous_bytes: int = 0  # resident memory of its own,
    file_bytes: int = 0  # of mapped files,
    shared_bytes: int = 0  # and of shared memory, such as packed weights; every process that maps it counts it


class StageSeconds(Struct, frozen=True, array_like=True):
    """Where a stage of a pipeline has spent its time."""

    busy: float
    input: float = 0.0  # it waited for the stage before, with a plan at hand,
    ids: float = 0.0  # for the ids that the last stage samples; only the first stage,
    output: float = 0.0  # and for the stage that takes its result; only GPUs


class WorkerUsage(Struct, frozen=True, array_like=True, tag=True):
    """worker → core, about once a second, twice if there are several stages, and with the next ping when a
    `ReadExperts` has ended: what the rank takes of its machine and its device."""

    rank: int
    process: ProcessUsage
    memory: dict[str, int]  # kind → bytes of the device; `kv_cache` with what is free of it
    bandwidth: float = 0.0  # of the device's memory, bytes per second; 0: unknown
    bandwidth_source: Literal["", "measured", "nominal"] = ""  # nominal: clock × width of the bus, by NVML
    gpu: dict[str, float] = {}  # what NVML says of the device, by its name in /metrics
    available_bytes: int = 0  # of the host's memory, that its machine or cgroup can still give; 0: unknown
    stage: StageSeconds | None = None  # since the last report, if there are several stages
    read: ExpertsRead | None = None  # the last `ReadExperts`, from its end until the experts are placed


# ── core ⇄ grammar ────────────────────────────────────────────────────────────────────────────────────────────────────


class Constrain(Struct, frozen=True, array_like=True, tag=True):
    """core → grammar: the sequences `rid` … `rid + n - 1` follow this. `Constrained` answers, then `Masks`."""

    rid: int
    n: int
    constraint: Constraint
    tail_ids: bytes  # int32, the last ids of the prompt, which may have opened the reasoning
    resume_ids: bytes = b""  # int32, output generated before


class Sampled(Struct, frozen=True, array_like=True, tag=True):
    """core → grammar: the token that each constrained sequence sampled, and the sequences that have ended.

    A sequence may end before its `Constrained` was sent; its grammar is not compiled then."""

    rids: bytes  # int64
    ids: bytes  # int32, parallel to rids
    ended: bytes  # int64


class Constrained(Struct, frozen=True, array_like=True, tag=True):
    """grammar → core: the grammar of a `Constrain` is compiled, or `kind` and `detail` say why not."""

    rid: int
    kind: ErrorKind | None = None
    detail: str = ""
    param: str = ""  # as in `Failed`


class Masks(Struct, frozen=True, array_like=True, tag=True):
    """grammar → core: the tokens that each constrained sequence may sample next, in one of the four fields."""

    rids: bytes  # int64, of sequences restricted to their `bits`
    bits: bytes  # int32 [rids × ⌈vocab / 32⌉]; bit t % 32 of word t / 32: token t is allowed
    free: bytes = b""  # int64, of sequences that may sample any token
    complete: bytes = b""  # int64, of sequences whose grammar allows no further token: they end
    failed: tuple[tuple[int, ErrorKind, str], ...] = ()  # (rid, kind, one sentence for the client)


# ── core → detokenizer → api ─────────────────────────────────────────────────────────────────────────────────────────


class Usage(Struct, frozen=True, array_like=True):
    """Token counts of one sequence."""

    num_prompt: int
    num_output: int
    num_cached: int  # prompt tokens whose KV came from the prefix cache


class Opened(Struct, frozen=True, array_like=True, tag=True):
    """core → detokenizer: a sequence was scheduled for the first time; its tokens follow on the same path."""

    rid: int
    num_prompt: int
    num_cached: int
    prompt_ids: bytes  # the whole prompt if `text.prompt`, else its last few ids (context for the first output token)
    text: TextSpec
    times: Times = Times()
    resume_ids: bytes = b""  # as in `Enqueue`
    resume_chars: int = 0


class Tokens(Struct, frozen=True, array_like=True):
    """What one step produced for one sequence."""

    rid: int
    # int32, usually one. With finish = "stop" the last is the eos or stop token that ended the sequence; there is none
    # if a stop string ended it, or if its grammar allows no further token
    ids: bytes
    logprobs: RowLogprobs | None = None  # of `ids`, position by position
    prompt_logprobs: RowLogprobs | None = None  # of the prompt positions computed since the last `Tokens`
    finish: FinishReason | None = None
    stop_token_id: int | None = None  # that ended the sequence
    usage: Usage | None = None  # with `finish`
    vector: bytes = b""  # float32, with `finish`, of a sequence with `pooling`; one vector, or one a token


class TokenBatch(Struct, frozen=True, array_like=True, tag=True):
    """core → detokenizer: what one step produced. Each sequence is either in the columns or in `tokens`."""

    tokens: tuple[Tokens, ...]
    rids: bytes = b""  # int64, of sequences that got tokens and nothing else; repeated for each token
    ids: bytes = b""  # int32, parallel to rids

    def columns(self) -> Iterator[tuple[int, bytes]]:
        """(rid, the int32 bytes of its tokens) of each sequence in the columns."""
        rids, ids = memoryview(self.rids).cast("q"), self.ids
        start, num = 0, len(rids)
        for end in range(1, num + 1):
            if end == num or rids[end] != rids[start]:
                yield rids[start], ids[4 * start : 4 * end]
                start = end


class StopHit(Struct, frozen=True, array_like=True, tag=True):
    """detokenizer → core: these sequences reached a stop string; their clients have received the end already."""

    rids: tuple[int, ...]


class TopLogprob(Struct, frozen=True, array_like=True):
    """One candidate: its id, its text (U+FFFD for incomplete characters), its bytes, its log-probability."""

    id: int
    token: str
    bytes: bytes
    logprob: float


class TokenLogprob(Struct, frozen=True, array_like=True):
    """The chosen token of one position and the best candidates there, best first."""

    chosen: TopLogprob
    top: tuple[TopLogprob, ...]


class PromptEcho(Struct, frozen=True, array_like=True):
    """The prompt, for echo and return_token_ids. `logprobs` has one entry a position; the first is None."""

    ids: bytes
    text: str
    logprobs: tuple[TokenLogprob | None, ...] | None = None


class Chunk(Struct, frozen=True, array_like=True):
    """New text of one sequence: whole characters only, and never a part of a stop string."""

    rid: int
    text: str
    ids: bytes  # int32, of `text`, and any whose text is not complete yet
    logprobs: tuple[TokenLogprob, ...] | None = None  # parallel to ids
    prompt: PromptEcho | None = None  # in the first chunk, if `TextSpec.prompt`
    finish: FinishReason | None = None
    stop_reason: str | int | None = None  # the stop string or stop token id that ended the sequence
    usage: Usage | None = None  # with `finish`
    prompt_end: str | None = None  # in the first chunk, if `TextSpec.prompt_end`
    times: Times | None = None  # in the first chunk
    vector: bytes = b""  # as in `Tokens`
    lengths: bytes = b""  # int32, parallel to ids, only in a repetition after a resume: characters of `text` of each id


class TextBatch(Struct, frozen=True, array_like=True, tag=True):
    """detokenizer → api: the new text of all sequences of that api process."""

    chunks: tuple[Chunk, ...]


# ── directly to the api ──────────────────────────────────────────────────────────────────────────────────────────────


class Accepted(Struct, frozen=True, array_like=True, tag=True):
    """core → api: the sequence waits or runs; it will not be refused any more."""

    rid: int
    num_prompt: int


class Failed(Struct, frozen=True, array_like=True, tag=True):
    """all → api, core → detokenizer → api: the sequence has failed. `detail` is one sentence for the client."""

    rid: int
    kind: ErrorKind
    detail: str
    param: str = ""  # the field of the client's request that is at fault; empty: none
    num_tokens: int = 0  # context_length_exceeded: tokens of the prompt, 0 if not counted


class Tokenized(Struct, frozen=True, array_like=True, tag=True):
    """tokenizer → api: the answer to `Tokenize`."""

    rid: int
    ids: bytes  # int32
    pieces: tuple[str, ...] = ()  # parallel to ids if `Tokenize.pieces`


class Detokenized(Struct, frozen=True, array_like=True, tag=True):
    """tokenizer → api: the answer to `Detokenize`."""

    rid: int
    text: str


class Described(Struct, frozen=True, array_like=True, tag=True):
    """tokenizer → api: the answer to `Describe`."""

    rid: int
    special_tokens: dict[str, str]  # bos_token, eos_token …, those that the tokenizer has
    chat_template: str | None  # for conversations without tools
    tokenizer_class: str = ""  # as tokenizer_config.json has it


# ── reports ───────────────────────────────────────────────────────────────────────────────────────────────────────────


class Pulse(Struct, frozen=True, array_like=True, tag=True):
    """tokenizer, core, grammar, detokenizer → api, twice a second: the state of its event loop."""

    name: str
    loop_lag_s: HistogramCounts  # delay of the loop's timers
    num_stale: int = 0  # frames of earlier epochs that it has dropped
    engine: int = 0  # of the process, if the launch has several
    usage: ProcessUsage = ProcessUsage()


class TierSnapshot(Struct, frozen=True, array_like=True):
    """One KV tier behind the device: gauges and running totals."""

    name: str
    num_blocks: int  # stored now
    capacity: int  # blocks; 0: not bounded
    num_hit_tokens: int  # prompt tokens loaded from it
    num_stored: int  # blocks written to it
    num_evicted: int  # blocks dropped to make room
    num_failed: int  # blocks that could not be loaded
    num_loaded_bytes: int = 0  # of blocks that could, on all ranks
    is_common: bool = False  # all KV domains have it together, and others may as well
    kv_digest: str = ""  # hex; between p2p tiers KV travels only if theirs are equal; empty: it travels by no peers


class GroupSnapshot(Struct, frozen=True, array_like=True):
    """One cache group: gauges and running totals."""

    kind: str  # as in `GroupShape`; "none": of prefixes after which nothing more was lacking
    num_held: int  # pages in block tables
    num_idle: int  # pages that are only kept for others to find
    num_hit_tokens: int  # found at admissions, where this group lacked what more would have needed
    num_lost_tokens: int  # behind these, found in the group of full attention


class StageSnapshot(Struct, frozen=True, array_like=True):
    """The seconds of one stage of a pipeline while plans were in flight."""

    seconds: StageSeconds
    plan_s: float  # it waited for a plan


class WorkerSnapshot(Struct, frozen=True, array_like=True):
    """One rank: its last report, and what the core knows besides."""

    usage: WorkerUsage
    memory: dict[str, int]  # kind → bytes; that of the KV cache by its use: kv_used, kv_cached, kv_free, host_tier
    read_bytes: int = 0  # that its steps so far had to read: weights, and KV of their contexts
    roof_ratio: float = 0.0  # in the last seconds: the time to read these bytes once / the time of steps; 0: unknown


class Snapshot(Struct, frozen=True, array_like=True, tag=True):
    """core → api, a few times a second while it works: gauges and running totals for /metrics and /health."""

    step: int
    num_running: int
    num_waiting: int
    num_blocks: int
    num_blocks_used: int
    num_preemptions: int
    num_prompt_tokens: int  # prompt tokens of scheduled sequences
    num_cached_tokens: int  # of those, from the prefix cache
    num_output_tokens: int
    step_age_s: float  # age of the oldest plan in flight; 0: none is in flight
    tiers: tuple[TierSnapshot, ...] = ()  # beyond the device
    num_drafts: int = 0  # how often draft tokens were proposed for a sequence
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0  # of the draft tokens
    histograms: dict[str, HistogramCounts] = {}  # of steps, by their name in /metrics
    num_out_of_memory: int = 0  # steps that were repeated because the device had no memory for them
    num_mended: int = 0  # repairs of rows and blocks that did not add up while the engine was idle
    is_asleep: bool = False  # after `Sleep`
    groups: tuple[GroupSnapshot, ...] = ()  # in the order of the cache's groups, and then "none"
    failed_kernels: tuple[str, ...] = ()  # of the workers: slower ones replace them
    stages: tuple[StageSnapshot, ...] = ()  # if there are several
    bubble_ratio: float = 0.0  # of the stages' time with plans in flight in the last seconds, what was not busy
    expert_tokens: tuple[int, ...] = ()  # of each rank: tokens that its experts had, one for each expert of a token
    expert_imbalance: dict[int, float] = {}  # by layer: the busiest rank's tokens in relation to the mean rank's
    num_taken_back: int = 0  # preemptions of constrained sequences because their masks took too long
    engine: int = 0  # of the core, if the launch has several
    prompt_ms: float = 0.0  # to compute a prompt's token; 0: unknown
    load_ms: float = 0.0  # to load a token's KV from behind the device; 0: unknown
    rank_sent_bytes: tuple[
        int, ...
    ] = ()  # of each rank: bytes that others have read from it; if ranks have whole experts
    num_failed_calls: int = 0  # of the runner plugin
    num_slow_calls: int = 0
    workers: tuple[WorkerSnapshot, ...] = ()  # by rank, of those that have reported


# ── sleep ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


class Sleep(Struct, frozen=True, array_like=True, tag=True):
    """api → core → workers: release the memory that can be restored. Open requests wait until `Wake`."""


class Wake(Struct, frozen=True, array_like=True, tag=True):
    """api → core → workers: restore the memory and continue."""


class Slept(Struct, frozen=True, array_like=True, tag=True):
    """workers → core → api: the outcome of `Sleep` or `Wake`."""

    is_asleep: bool
    num_bytes: int = 0  # released; of this rank, or to the api of all ranks
    problem: str = ""  # why it failed, one sentence; empty: it succeeded
    rank: int = 0
    engine: int = 0  # if the launch has several


# ── supervisor ────────────────────────────────────────────────────────────────────────────────────────────────────────


class Facts(Struct, frozen=True, array_like=True):
    """What an actor reports of its start."""

    timings: dict[str, float] = {}  # part of the start → seconds, in order
    notes: tuple[str, ...] = ()  # lines for the operator, such as the size of the KV cache
    weights_fit: bool = True  # False: the worker's shared memory for packed weights held something else


class Ready(Struct, frozen=True, array_like=True, tag=True):
    """An actor has started and reads its mailbox."""

    name: str
    schema: int
    facts: Facts
    epoch: int = 1  # in which it started


class Serving(Struct, frozen=True, array_like=True, tag=True):
    """api → supervisor: the port is open."""

    url: str


class Fault(Struct, frozen=True, array_like=True, tag=True):
    """An actor cannot go on. `summary`: a sentence for the operator. `trace`: the traceback, empty for user errors.
    `broken_kernel`: the GPU kernel whose check broke the device of the process, or empty. The next process can serve
    without it."""

    name: str
    summary: str
    trace: str
    exit_code: int
    broken_kernel: str = ""


class Gap(Struct, frozen=True, array_like=True, tag=True):
    """An actor has lost messages of another one, because the connection between their machines broke (`gaps.py`). What
    that one still sends is dropped, so their epoch has to end."""

    name: str  # of the receiver, which says so
    sender: str
    epoch: int  # of the link between them


class Serve(Struct, frozen=True, array_like=True, tag=True):
    """supervisor → api: all processes are ready, open the port."""


class Ping(Struct, frozen=True, array_like=True, tag=True):
    """supervisor → all, twice a second. The loop that does the work answers, so that a hang is noticed."""

    late_beats: dict[str, int] = {}  # of each follower, those that came when half of its lease was over
    waits_for: str = ""  # what the engine waits for outside of this machine, a clause; empty: nothing


class Loading(Struct, frozen=True, array_like=True, tag=True):
    """worker → supervisor: how much of its weights it has read, a few times a second while it starts."""

    name: str
    bytes_read: int
    bytes: int  # of all its weights


class Pong(Struct, frozen=True, array_like=True, tag=True):
    """The answer to `Ping`."""

    name: str
    epoch: int = 1  # the epoch of its state
    progress: int = 0  # grows with each unit of work that it completes
    is_busy: bool = False  # a unit of work has begun and is not complete
    settings: int = 0  # number of the `Settings` that hold in it; of workers always 0
    step_age_s: float = 0.0  # of the core, as in `Snapshot`


class Reset(Struct, frozen=True, array_like=True, tag=True):
    """supervisor → all: a process or a connection has died, and a new epoch begins. Messages under way are void.

    All processes forget the requests of the api, whose gateway submits them again after `Restored`, or to another
    engine of the launch. If `device_epoch` has changed as well, core and workers also forget rows, plans and results.
    """

    epoch: int
    device_epoch: int
    lost: tuple[str, ...]  # names of the processes that have died, or are replaced with them; (): none has failed
    reason: str  # one sentence, for /health
    engine: int = 0  # if the launch has several


class Restored(Struct, frozen=True, array_like=True, tag=True):
    """supervisor → api: all processes behind the api are running and in this epoch."""

    epoch: int
    engine: int = 0  # if the launch has several


class Vacate(Struct, frozen=True, array_like=True, tag=True):
    """supervisor → api: send this engine nothing new, since it will be restarted. `Vacated` answers when nothing of the
    api is open there; `Restored` ends it."""

    engine: int


class Vacated(Struct, frozen=True, array_like=True, tag=True):
    """api → supervisor: nothing of this api process is open at the engine."""

    name: str  # of the api process
    engine: int


class Stop(Struct, frozen=True, array_like=True, tag=True):
    """supervisor → all: shut down within `grace_s` seconds."""

    grace_s: float
    reason: str
    hands_over: bool = False  # to an api: its successor has the port; finish the open connections
    is_failure: bool = False  # to an api: the engine has failed; open requests fail and /health is 503


class Leave(Struct, frozen=True, array_like=True, tag=True):
    """supervisor → every process of another launch → its supervisor: the sender's launch shuts down.

    The whole engine ends with it: the launch that has the api drains first, and the others wait for it."""

    names: tuple[str, ...]  # of the processes of the sender's launch


class Swap(Struct, frozen=True, array_like=True, tag=True):
    """api → supervisor: serve another model, or this one with other settings. `Swapped` answers."""

    name: str  # of the api process
    number: int  # of this swap; `Swapped` repeats it
    changes: bytes  # a JSON object of settings by name
    version: int | None = None  # go back to this version, with the changes
    must_drain: bool = False  # drain first instead of holding both models in memory


class Swapped(Struct, frozen=True, array_like=True, tag=True):
    """supervisor → api: the outcome of a `Swap` or a `Change`."""

    number: int
    status: int  # of HTTP: 200: done; 202: will be served once open requests have ended; 4xx, 5xx: refused
    detail: str


class Change(Struct, frozen=True, array_like=True, tag=True):
    """api → supervisor: change settings while everything runs. `Swapped` answers once they hold."""

    name: str  # of the api process
    number: int  # as of `Swap`, in the same sequence
    changes: bytes  # a JSON object of settings by name
    who: str  # asks for it


class ChangedSetting(Struct, frozen=True, array_like=True):
    """A setting that was changed while everything ran."""

    name: str
    old: object
    new: object
    who: str
    at: float  # seconds since 1970


class Settings(Struct, frozen=True, array_like=True, tag=True):
    """supervisor → all: what holds from now on. Only settings that may change while everything runs differ from those
    with which the process was started."""

    number: int  # of the change, from 1; `Pong` repeats it
    engine: EngineConfig
    http: HttpConfig | None  # with the keys: for api processes only
    history: tuple[ChangedSetting, ...] = ()  # the last changes, oldest first; for api processes only
    kept: tuple[str, ...] = ()  # names of those that later servers with the same --state have as well


class Demand(Struct, frozen=True, array_like=True, tag=True):
    """api → supervisor of several models: this api process has requests for a model, or has no more."""

    name: str  # of the api process
    model: int  # its number
    is_open: bool
    keep_alive_s: float | None = None  # what the last request said of the model's stay; inf: no bound


class ModelState(Struct, frozen=True, array_like=True):
    """One of several models behind one port."""

    state: Literal["unloaded", "loading", "loaded", "leaving", "failed"]
    since: float  # on the machine's monotonic clock
    need_bytes: int  # of memory while it is loaded
    is_pinned: bool
    expires_at: float  # it is unloaded then if it is not used, on the same clock; inf: not by itself
    load_s: float  # that its last load took; 0: none has ended
    problem: str  # why it failed last; empty: it has not
    progress: float | None = None  # of reading its weights, 0 to 1, while it is loading
    version: int = 1  # one more with each replacement
    fits: bool = False  # it is not loaded, and can be without unloading another one


class ModelStates(Struct, frozen=True, array_like=True, tag=True):
    """supervisor of several models → api: which are loaded. Sent with each change."""

    models: tuple[ModelState, ...]


class Replaced(Struct, frozen=True, array_like=True, tag=True):
    """supervisor of several models → api: one of them has another version. The engines of the old one have ended."""

    model: int  # its number
    config: bytes  # of its first engine: an `EngineConfig` in JSON


# ── what each mailbox accepts ────────────────────────────────────────────────────────────────────────────────────────

ToTokenizer = Submit | Cancel | Tokenize | Detokenize | Describe | Ping | Reset | Leave | Stop | Settings
ToCore = (
    Enqueue | Cancel | StopHit | CacheOffer | StepResult | Transferred | Constrained | Masks | Sleep | Wake | Slept
    | Ping | Reset | Leave | Stop | ExpertLoad | Settings | WorkerUsage
)  # fmt: skip
ToGrammar = Constrain | Sampled | Ping | Reset | Leave | Stop | Settings
ToWorker = (
    OpenCache | StepPlan | LateMasks | Hidden | SampledIds | Sleep | Wake | Ping | Reset | Leave | Stop | PlaceExperts
    | Settings | ReadExperts
)  # fmt: skip
ToDetokenizer = Opened | TokenBatch | Failed | Ping | Reset | Leave | Stop | Settings
ToApi = (
    Accepted | TextBatch | Failed | Snapshot | Pulse | Tokenized | Detokenized | Described | Slept
    | Serve | Ping | Reset | Restored | Swapped | Leave | Stop | Vacate
    | ModelStates | Replaced | Settings
)  # fmt: skip
ToSupervisor = Ready | Loading | Serving | Fault | Gap | Pong | Swap | Change | Leave | Vacated | Demand
Message = ToTokenizer | ToCore | ToGrammar | ToWorker | ToDetokenizer | ToApi | ToSupervisor
