"""Every message of the pipeline, in pipeline order.

A message is a fact: frozen, complete, and encoded as a msgpack array (`array_like`), so fields are only ever appended.
Columns of integers travel as the bytes of little-endian int32 (`ids_to_bytes`), never as lists: an 8k-token prompt then
decodes in a microsecond. `SCHEMA_VERSION` changes with every change here; both ends compare it in `Ready`.

    api ─Submit, Cancel─▶ tokenizer ─Enqueue, Cancel─▶ core ═StepPlan▶ worker ═StepResult, Transferred▶ core
    core ─Opened, TokenBatch─▶ detokenizer ─TextBatch─▶ api          detokenizer ─StopHit─▶ core
    tokenizer, core ─Accepted, Failed, Snapshot, Pulse─▶ api         anyone ─Ready, Fault, Pong─▶ supervisor
    api ─Tokenize, Detokenize, Describe─▶ tokenizer ─Tokenized, Detokenized, Described─▶ api
    core ─Constrain, Sampled─▶ grammar ─Constrained, Masks─▶ core
    supervisor ─Ping, Reset, Leave, Stop─▶ anyone       supervisor ─Serve, Restored, Swapped─▶ api ─Swap─▶ supervisor

`rid` is an unsigned 63-bit number: the api process's index in the high bits, a counter below. One rid is one sequence
(one choice of one prompt). Exactly one terminal message ends it: a `Tokens` or `Chunk` with `finish`, or a `Failed`.
"""

import math
from array import array
from collections.abc import Iterator
from typing import Annotated, Literal

from msgspec import Meta, Struct

from ..errors import ErrorKind
from .constraints import MAX_GRAMMAR_BYTES as MAX_GRAMMAR_BYTES
from .constraints import Constrain as Constrain
from .constraints import Constrained as Constrained
from .constraints import Constraint as Constraint
from .constraints import Masks as Masks
from .constraints import Sampled as Sampled
from .constraints import Source as Source
from .prompts import ChatPrompt as ChatPrompt
from .prompts import IdsPrompt as IdsPrompt
from .prompts import PairPrompt as PairPrompt
from .prompts import Pooling as Pooling
from .prompts import TextPrompt as TextPrompt
from .reports import Pulse as Pulse
from .reports import Snapshot as Snapshot
from .reports import TierSnapshot as TierSnapshot
from .reports import Times as Times
from .sleep import Sleep as Sleep
from .sleep import Slept as Slept
from .sleep import Wake as Wake
from .supervision import Facts as Facts
from .supervision import Fault as Fault
from .supervision import Leave as Leave
from .supervision import Ping as Ping
from .supervision import Pong as Pong
from .supervision import Ready as Ready
from .supervision import Reset as Reset
from .supervision import Restored as Restored
from .supervision import Serve as Serve
from .supervision import Serving as Serving
from .supervision import Stop as Stop
from .supervision import Swap as Swap
from .supervision import Swapped as Swapped

SCHEMA_VERSION = 9

RID_BITS = 40  # of a rid: the counter; above it the api process's index

FinishReason = Literal["stop", "length", "abort"]
"""Why a request ended: an eos/stop token or stop string; a length limit; cancelled by its client."""


def ids_to_bytes(ids: "list[int] | array[int]") -> bytes:
    """Little-endian int32 bytes of token ids, block ids or rows."""
    return (ids if isinstance(ids, array) else array("i", ids)).tobytes()


def bytes_to_ids(data: bytes) -> "array[int]":
    """The inverse of `ids_to_bytes`, as `array('i')`. Raises ValueError if `data` is no whole number of int32."""
    ids = array("i")
    ids.frombytes(data)
    return ids


# ── what a request asks for ──────────────────────────────────────────────────────────────────────────────────────────


MAX_CHOICES = 128  # of one prompt
MAX_BIASES = 1024  # of a request; a GPU has room for as many in each row
MAX_STOP_TOKENS = 1024
MAX_ALLOWED_TOKENS = 4096
MAX_BAD_WORDS = 1024
BadWord = Annotated[str, Meta(min_length=1, max_length=256)]
StopString = Annotated[str, Meta(min_length=1, max_length=4096)]


class Sampling(Struct, frozen=True, array_like=True):
    """How the next token is drawn. Bounds are checked by every decoder that reads it, NaN and infinity included."""

    temperature: Annotated[float, Meta(ge=0.0, le=100.0)] = 1.0  # 0: greedy
    top_k: Annotated[int, Meta(ge=0, le=2**31 - 1)] = 0  # 0: off
    top_p: Annotated[float, Meta(gt=0.0, le=1.0)] = 1.0
    min_p: Annotated[float, Meta(ge=0.0, le=1.0)] = 0.0
    repetition_penalty: Annotated[float, Meta(gt=0.0, le=100.0)] = 1.0  # over prompt and output
    presence_penalty: Annotated[float, Meta(ge=-2.0, le=2.0)] = 0.0  # over output
    frequency_penalty: Annotated[float, Meta(ge=-2.0, le=2.0)] = 0.0  # over output
    logit_bias: dict[int, float] | None = None  # token id → added to its logit; at most MAX_BIASES
    seed: Annotated[int, Meta(ge=0, le=2**63 - 1)] = 0  # noise is keyed by (seed, output position)
    logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None  # None: none; n: the sampled token's and the n best
    prompt_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None  # the same for every prompt position but the first
    allowed_token_ids: Annotated[tuple[int, ...], Meta(max_length=MAX_ALLOWED_TOKENS)] = ()  # no other; (): any

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
    """When the core ends a request by itself."""

    max_tokens: Annotated[int, Meta(ge=0)] | None = None  # None: to the end of the context; 0: score the prompt only
    stop_token_ids: Annotated[tuple[int, ...], Meta(max_length=MAX_STOP_TOKENS)] = ()  # besides the model's own eos ids
    ignore_eos: bool = False
    queue_timeout_s: Annotated[float, Meta(gt=0.0, le=1e9)] | None = None  # fail rather than wait longer for a row
    min_tokens: Annotated[int, Meta(ge=0)] = 0  # no eos or stop token is drawn before so many tokens were


class TextSpec(Struct, frozen=True, array_like=True):
    """What the detokenizer does with a request's ids. It rides through the core untouched."""

    stop: Annotated[tuple[StopString, ...], Meta(max_length=16)] = ()
    include_stop: bool = False  # keep the matched stop string in the text
    skip_special_tokens: bool = True
    detokenize: bool = True  # False: ids only, `Chunk.text` stays empty
    prompt: bool = False  # send the prompt's ids and text back in the first `Chunk` (echo, return_token_ids)
    marks: tuple[str, ...] = ()  # special tokens to show although others are skipped
    prompt_end: bool = False  # send the text of the prompt's last ids back in the first `Chunk`, nothing skipped
    min_tokens: int = 0  # a stop string that is complete before so many tokens is only text


# ── api → tokenizer → core ───────────────────────────────────────────────────────────────────────────────────────────


class Submit(Struct, frozen=True, array_like=True, tag=True):
    """api → tokenizer: `n` sequences of one prompt, with the rids `rid` … `rid + n - 1` and seeds `seed + i`."""

    rid: int
    n: Annotated[int, Meta(ge=1, le=MAX_CHOICES)]
    prompt: TextPrompt | ChatPrompt | IdsPrompt | PairPrompt
    sampling: Sampling
    limits: Limits
    text: TextSpec
    priority: int = 0  # lower is served first
    salt: bytes = b""  # keeps prefix-cache entries of different owners apart
    tenant: str = ""  # who shares the engine fairly: the API key's digest, else the `user` of the request
    truncate: Annotated[int, Meta(ge=-1)] | None = None  # keep so many of the prompt's last tokens; -1: all that fit
    constraint: Constraint | None = None
    bad_words: Annotated[tuple[BadWord, ...], Meta(max_length=MAX_BAD_WORDS)] = ()  # texts; see `Constraint`
    pooling: Pooling | None = None  # with n = 1 and max_tokens = 0; the answer is `Chunk.vector`
    resume_ids: bytes = b""  # see `Enqueue`
    resume_chars: Annotated[int, Meta(ge=-1)] = 0
    attempt: int = 0


class Enqueue(Struct, frozen=True, array_like=True, tag=True):
    """tokenizer → core: `n` sequences of one prompt, tokenized and checked against the context length.

    Their rids are `rid` … `rid + n - 1`, their seeds `seed + i`. `resume_ids`: output that was delivered before the
    engine lost the sequence; it goes on after them (only with n = 1).
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
    times: Times = Times()  # so far
    pooling: Pooling | None = None
    type_ids: bytes = b""  # uint8, parallel to prompt_ids: which text of a pair a token is of; empty: there is one
    resume_chars: Annotated[int, Meta(ge=-1)] = 0  # delivered of the text of `resume_ids`; -1: send it all again
    attempt: int = 0  # how often the engine has lost it: one that was accepted before is not refused for its queue


class Tokenize(Struct, frozen=True, array_like=True, tag=True):
    """api → tokenizer: which ids a prompt has. `Tokenized` or `Failed` answers; nothing is generated."""

    rid: int
    prompt: TextPrompt | ChatPrompt
    pieces: bool = False  # send the text of each token back, too


class Detokenize(Struct, frozen=True, array_like=True, tag=True):
    """api → tokenizer: which text these ids are, special tokens included. `Detokenized` or `Failed` answers."""

    rid: int
    ids: bytes  # int32, all of the vocabulary
    skip_special_tokens: bool = False


class Describe(Struct, frozen=True, array_like=True, tag=True):
    """api → tokenizer: what kind of tokenizer it is. `Described` answers."""

    rid: int


class Cancel(Struct, frozen=True, array_like=True, tag=True):
    """api → tokenizer → core: these rids' client is gone. Takes the path of its `Submit`, so it never overtakes it."""

    rids: tuple[int, ...]


# ── core ⇄ worker ────────────────────────────────────────────────────────────────────────────────────────────────────


class CacheOffer(Struct, frozen=True, array_like=True, tag=True):
    """worker → core: how many KV blocks this rank has room for, and how large one is."""

    rank: int
    num_blocks: int
    block_bytes: int = 0


class OpenCache(Struct, frozen=True, array_like=True, tag=True):
    """core → worker: allocate exactly this many KV blocks."""

    num_blocks: int


class RowOpen(Struct, frozen=True, array_like=True):
    """A request takes a row on the worker. Whatever the row held before is forgotten."""

    row: int
    ids: bytes  # prompt and, after a preemption, the output so far
    num_prompt: int  # the output starts at this position; output position = position - num_prompt
    num_computed: int  # leading positions whose KV is in the blocks already (prefix hit)
    block_ids: bytes  # the row's block table so far, hits first
    sampling: Sampling
    min_len: int = 0  # while the row has fewer ids, none of `ends` is drawn
    ends: bytes = b""  # int32, at most MAX_BIASES together with those of `logit_bias`
    pooling: Pooling | None = None  # the step that computes the last position of the prompt answers with a vector
    type_ids: bytes = b""  # see `Enqueue`


class StepPlan(Struct, frozen=True, array_like=True, tag=True):
    """core → worker: one forward pass. A diff against what the rows already hold, in columns.

    Applied in this order: `open`, then `grow` (append a block to a row's table), then what `kv` tells the KV connector
    (which first reads the blocks it is to keep, then writes those it loads), then `copies`, then the pass over `rows`,
    where row `rows[i]` computes its next `counts[i]` positions and, if `sample[i]` is 1, draws one token that becomes
    the id of the position after them. The worker keeps ids, so a decode row is planned before its last id is known to
    the core. A plan may have no rows.

    The first `num_speculative` rows have count 1 and sample 1 and may compute up to `speculate` positions more: of ids
    that the worker guesses from the row's own. A guess is accepted if it is the token that is drawn at its place. So
    such a row draws one token for each guess that was accepted, and one after them, as in a step without guesses; its
    blocks hold all the positions that it may compute. The next plan goes on where the worker is.
    """

    step: int
    open: tuple[RowOpen, ...]
    grow_rows: bytes  # int32, parallel to grow_blocks; a row may appear several times
    grow_blocks: bytes  # int32
    rows: bytes  # int32, each row at most once
    counts: bytes  # int32, ≥ 1
    sample: bytes  # uint8, 0 or 1
    copies: bytes = b""  # int32 pairs (from block, to block); all are read before any is written
    kv: bytes = b""  # metadata for the worker half of the KV connector; empty: nothing to do
    extension: bytes = b""  # per-step metadata of a plan extension, for the attention backend that it wraps
    num_speculative: int = 0
    speculate: int = 0
    break_even: float = 0.5  # the share of guesses, between 0 and 1, that must come true for guessing to pay
    masked_rows: bytes = b""  # int32, of the rows that draw, those that may not draw everything
    masks: bytes = b""  # int32 [masked_rows × ⌈vocab / 32⌉], see `Masks.bits`
    after_fault: bool = False  # the core knows of the last `StepResult.fault`, and nothing here depends on that step


class RowLogprobs(Struct, frozen=True, array_like=True):
    """Log-probabilities of consecutive positions of one row: `width` entries each, the chosen token's first."""

    width: int
    ids: bytes  # int32 [positions × width]
    values: bytes  # float32 [positions × width], natural log, never NaN


class StepResult(Struct, frozen=True, array_like=True, tag=True):
    """worker → core: what a plan's pass gave, in the plan's order.

    With `fault` it gave nothing: the rows of the plan are as good as never opened, and what it would have computed is
    not to be read. Plans that follow are answered alike, without a pass, until one says `after_fault`. What a plan
    tells the KV connector is done in any case."""

    step: int
    ids: bytes  # int32, those of each row with sample = 1; -1: the row's logits were not finite, fail that request
    logprobs: dict[int, RowLogprobs]  # index into the plan's rows → the sampled token's
    prompt_logprobs: dict[int, RowLogprobs]  # index into the plan's rows → those of the prompt positions it computed
    device_ms: float
    num_sampled: bytes = b""  # int32, how many of `ids` each row with sample = 1 drew; empty: one each
    num_drafts: int = 0  # rows that computed guesses
    num_draft_tokens: int = 0  # guesses
    vectors: dict[int, bytes] = {}  # index into the plan's rows → float32; empty: not finite, fail that request
    fault: Literal["out_of_memory"] | None = None


class Transferred(Struct, frozen=True, array_like=True, tag=True):
    """worker → core: what became of KV transfers that plans asked for. Sent after the step that finished them."""

    loaded: tuple[int, ...]  # rids whose load is over, well or not
    failed_blocks: bytes  # int32: of those loads, the blocks that do not hold what they should
    sent: tuple[int, ...]  # ended rids whose blocks the connector no longer needs
    num_blocks: int = 0  # that were loaded
    load_ms: float = 0.0  # what loading them took


# ── core → detokenizer → api ─────────────────────────────────────────────────────────────────────────────────────────


class Usage(Struct, frozen=True, array_like=True):
    """Token counts of one sequence."""

    num_prompt: int
    num_output: int
    num_cached: int  # prompt tokens whose KV came from the prefix cache


class Opened(Struct, frozen=True, array_like=True, tag=True):
    """core → detokenizer: a request was scheduled for the first time; its tokens follow on the same path."""

    rid: int
    num_prompt: int
    num_cached: int
    prompt_ids: bytes  # the whole prompt if `text.prompt`, else its last few ids (context for the first output token)
    text: TextSpec
    times: Times = Times()
    resume_ids: bytes = b""  # see `Enqueue`
    resume_chars: int = 0


class Tokens(Struct, frozen=True, array_like=True):
    """One step's news of one request."""

    rid: int
    # int32, usually one; with finish = "stop" the last is the eos or stop token that ended it, or there are none: its
    # text was stopped, or nothing could be added to what its grammar has
    ids: bytes
    logprobs: RowLogprobs | None = None  # of `ids`, position by position
    prompt_logprobs: RowLogprobs | None = None  # of the prompt positions computed since the last news
    finish: FinishReason | None = None
    stop_token_id: int | None = None  # the stop token that ended it, if one did
    usage: Usage | None = None  # with `finish`
    vector: bytes = b""  # float32, with `finish`, of a request with `pooling`; of all its tokens one after another


class TokenBatch(Struct, frozen=True, array_like=True, tag=True):
    """core → detokenizer: one step's news of all requests, each of them either in the columns or in `tokens`."""

    tokens: tuple[Tokens, ...]
    rids: bytes = b""  # int64, of the requests that got tokens and nothing else: as often as they got one, in a row
    ids: bytes = b""  # int32, parallel to rids

    def columns(self) -> Iterator[tuple[int, bytes]]:
        """(rid, the int32 bytes of its tokens) of each request in the columns."""
        rids, ids = memoryview(self.rids).cast("q"), self.ids
        start, num = 0, len(rids)
        for end in range(1, num + 1):
            if end == num or rids[end] != rids[start]:
                yield rids[start], ids[4 * start : 4 * end]
                start = end


class StopHit(Struct, frozen=True, array_like=True, tag=True):
    """detokenizer → core: stop strings were found in these requests' text; their clients have been told the end."""

    rids: tuple[int, ...]


class TopLogprob(Struct, frozen=True, array_like=True):
    """One candidate: its id, its text (U+FFFD where it is no whole character), its bytes, its log-probability."""

    id: int
    token: str
    bytes: bytes
    logprob: float


class TokenLogprob(Struct, frozen=True, array_like=True):
    """The chosen token of one position and the best candidates there, best first."""

    chosen: TopLogprob
    top: tuple[TopLogprob, ...]


class PromptEcho(Struct, frozen=True, array_like=True):
    """What the prompt was, for echo and return_token_ids. `logprobs` has one entry a position; the first is None."""

    ids: bytes
    text: str
    logprobs: tuple[TokenLogprob | None, ...] | None = None


class Chunk(Struct, frozen=True, array_like=True):
    """News of one request in text. Text is only ever whole characters and never part of a stop string."""

    rid: int
    text: str
    ids: bytes  # the ids behind `text`, and any that gave no text yet
    logprobs: tuple[TokenLogprob, ...] | None = None  # parallel to ids
    prompt: PromptEcho | None = None  # in the first chunk, if `TextSpec.prompt`
    finish: FinishReason | None = None
    stop_reason: str | int | None = None  # the stop string or stop token id that ended it
    usage: Usage | None = None  # with `finish`
    prompt_end: str | None = None  # in the first chunk, if `TextSpec.prompt_end`
    times: Times | None = None  # in the first chunk
    vector: bytes = b""  # see `Tokens`
    lengths: bytes = b""  # int32, parallel to ids, of what is told again: characters of `text` that each gave


class TextBatch(Struct, frozen=True, array_like=True, tag=True):
    """detokenizer → api: one step's news of all requests of that api process."""

    chunks: tuple[Chunk, ...]


# ── straight to the api ──────────────────────────────────────────────────────────────────────────────────────────────


class Accepted(Struct, frozen=True, array_like=True, tag=True):
    """core → api: the request waits or runs; from here on only its own end ends it."""

    rid: int
    num_prompt: int


class Failed(Struct, frozen=True, array_like=True, tag=True):
    """anyone → api, core → detokenizer → api: this request ends here. `detail` is one sentence for the client."""

    rid: int
    kind: ErrorKind
    detail: str
    param: str = ""  # the field of the client's request that is at fault, if one is
    num_tokens: int = 0  # context_length_exceeded: the prompt's, if they were counted


class Tokenized(Struct, frozen=True, array_like=True, tag=True):
    """tokenizer → api: the answer to `Tokenize`."""

    rid: int
    ids: bytes  # int32
    pieces: tuple[str, ...] = ()  # parallel to ids if they were asked for


class Detokenized(Struct, frozen=True, array_like=True, tag=True):
    """tokenizer → api: the answer to `Detokenize`."""

    rid: int
    text: str


class Described(Struct, frozen=True, array_like=True, tag=True):
    """tokenizer → api: the answer to `Describe`."""

    rid: int
    special_tokens: dict[str, str]  # bos_token, eos_token …, as far as there are any
    chat_template: str | None  # the one for conversations without tools


# ── what each mailbox accepts ────────────────────────────────────────────────────────────────────────────────────────

ToTokenizer = Submit | Cancel | Tokenize | Detokenize | Describe | Ping | Reset | Leave | Stop
ToCore = (
    Enqueue | Cancel | StopHit | CacheOffer | StepResult | Transferred | Constrained | Masks | Sleep | Wake | Slept
    | Ping | Reset | Leave | Stop
)  # fmt: skip
ToGrammar = Constrain | Sampled | Ping | Reset | Leave | Stop
ToWorker = OpenCache | StepPlan | Sleep | Wake | Ping | Reset | Leave | Stop
ToDetokenizer = Opened | TokenBatch | Failed | Ping | Reset | Leave | Stop
ToApi = (
    Accepted | TextBatch | Failed | Snapshot | Pulse | Tokenized | Detokenized | Described | Slept
    | Serve | Ping | Reset | Restored | Swapped | Leave | Stop
)  # fmt: skip
ToSupervisor = Ready | Serving | Fault | Pong | Swap | Leave
Message = ToTokenizer | ToCore | ToGrammar | ToWorker | ToDetokenizer | ToApi | ToSupervisor
