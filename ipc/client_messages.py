"""Messages between the engine core and its clients. docs/ipc-protocol.md describes them for any language.

A client sends and receives token ids, without api, tokenizer and detokenizer. It connects a DEALER socket to the ROUTER
of `procs/client_port.py`; each frame is one message, encoded as in `messages`. A connection is a session: it begins
with `Hello`, and its sequences end with it.

`PROTOCOL` changes only if an old client would no longer work; fields and kinds of messages may be appended without.
"""

from typing import Annotated

from msgspec import Meta, Struct

from .messages import MAX_CHOICES as MAX_CHOICES
from .messages import Accepted, Cancel, Constraint, Failed, Limits, RowLogprobs, Sampling, Snapshot, Tokens

PROTOCOL = 1

Rid = Annotated[int, Meta(ge=0, lt=2**53)]
"""The client's number for a sequence, unique among its open ones. 2⁵³ is exact in every language's numbers."""


# ── client → core ────────────────────────────────────────────────────────────────────────────────────────────────────


class Hello(Struct, frozen=True, array_like=True, tag=True):
    """The first message of a connection. Answered with `Welcome` once the model is loaded, or with `Goodbye`."""

    protocol: int
    name: Annotated[str, Meta(max_length=64)] = ""  # for the log; the tenant of requests that name none
    window: Annotated[int, Meta(ge=1, le=4096)] = 64  # the most `News` that may be unacknowledged


class Generate(Struct, frozen=True, array_like=True, tag=True):
    """`n` sequences of one prompt, with the rids `rid` … `rid + n - 1` and the seeds `seed + i`.

    `resume_ids`: output that the client has from an earlier session; the sequence goes on after it (only with n = 1).
    """

    rid: Rid
    n: Annotated[int, Meta(ge=1, le=MAX_CHOICES)]
    prompt_ids: bytes  # int32
    sampling: Sampling = Sampling()
    limits: Limits = Limits()
    priority: int = 0
    salt: Annotated[bytes, Meta(max_length=256)] = b""  # keeps prefix-cache entries of different owners apart
    tenant: Annotated[str, Meta(max_length=512)] = ""
    resume_ids: bytes = b""  # int32
    constraint: Constraint | None = None


class Ack(Struct, frozen=True, array_like=True, tag=True):
    """The client has read all `News` up to `seq`."""

    seq: int


class Bye(Struct, frozen=True, array_like=True, tag=True):
    """The client leaves: its sequences are cancelled, and nothing more is sent."""


# ── core → client ────────────────────────────────────────────────────────────────────────────────────────────────────


class Welcome(Struct, frozen=True, array_like=True, tag=True):
    """The session is open."""

    protocol: int
    model: str  # the served name
    model_key: bytes  # equal keys: equal requests give equal tokens, so sequences may be resumed here
    vocab_size: int
    max_model_len: int  # prompt and output, tokens
    eos_token_ids: tuple[int, ...]
    block_size: int  # tokens of a KV block, by which routers count shared prefixes


class News(Struct, frozen=True, array_like=True, tag=True):
    """All output since the last `News`, at most one item of a sequence in each of the four fields.

    Usually the output of one step; for a slow client the merged output of several.
    """

    seq: int  # 1, 2, 3 … in a session
    accepted: tuple[Accepted, ...]
    rids: bytes  # int64, of sequences that got tokens and nothing else
    counts: bytes  # int32, tokens of each
    ids: bytes  # int32, their tokens, one sequence after another
    tokens: tuple[Tokens, ...]  # of sequences with more than tokens: log-probabilities, the end
    failed: tuple[Failed, ...]


class Goodbye(Struct, frozen=True, array_like=True, tag=True):
    """The session has ended, or was refused. `reason` is one sentence."""

    reason: str


ToPort = Hello | Generate | Cancel | Ack | Bye
ToClient = Welcome | News | Snapshot | Goodbye


def join_logprobs(first: RowLogprobs | None, second: RowLogprobs | None) -> RowLogprobs | None:
    """The positions of `first`, then those of `second`."""
    if first is None or second is None:
        return first or second
    assert first.width == second.width, (first.width, second.width)
    return RowLogprobs(first.width, first.ids + second.ids, first.values + second.values)


def join_tokens(first: Tokens, second: Tokens) -> Tokens:
    """Merges two consecutive outputs of one sequence."""
    return Tokens(
        second.rid,
        first.ids + second.ids,
        join_logprobs(first.logprobs, second.logprobs),
        join_logprobs(first.prompt_logprobs, second.prompt_logprobs),
        second.finish,
        second.stop_token_id,
        second.usage,
    )
