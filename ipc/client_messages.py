"""What a client of the engine core and the core say to each other; docs/ipc-protocol.md says the same for any language.

A client is a process of somebody else's: it sends token ids and gets token ids, past api, tokenizer and detokenizer. It
connects a DEALER socket to the ROUTER of `procs/client_port.py`; each frame is one message, encoded as everywhere
(`messages`). A connection is a session: it begins with `Hello`, and what it has open ends with it.

`PROTOCOL` changes only when an old client could no longer be understood: fields and kinds may be appended without.
"""

from typing import Annotated

from msgspec import Meta, Struct

from .messages import MAX_CHOICES as MAX_CHOICES
from .messages import Accepted, Cancel, Constraint, Failed, Limits, RowLogprobs, Sampling, Snapshot, Tokens

PROTOCOL = 1

Rid = Annotated[int, Meta(ge=0, lt=2**53)]
"""A client's own number of a sequence, unlike those it has open: what every language's numbers can hold."""


# ── client → core ────────────────────────────────────────────────────────────────────────────────────────────────────


class Hello(Struct, frozen=True, array_like=True, tag=True):
    """The first message of a connection. Answered with `Welcome` once the model is loaded, or with `Goodbye`."""

    protocol: int
    name: Annotated[str, Meta(max_length=64)] = ""  # for the log, and its tenant where a request names none
    window: Annotated[int, Meta(ge=1, le=4096)] = 64  # most `News` that it lets be on the way unacknowledged


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
    """All `News` up to `seq` were taken in."""

    seq: int


class Bye(Struct, frozen=True, array_like=True, tag=True):
    """The client leaves: what it has open is cancelled, and nothing more is sent."""


# ── core → client ────────────────────────────────────────────────────────────────────────────────────────────────────


class Welcome(Struct, frozen=True, array_like=True, tag=True):
    """The session is open."""

    protocol: int
    model: str  # the name it is served under
    model_key: bytes  # the same: equal requests give equal tokens, so sequences may be resumed here
    vocab_size: int
    max_model_len: int  # prompt and output, tokens
    eos_token_ids: tuple[int, ...]


class News(Struct, frozen=True, array_like=True, tag=True):
    """Everything new since the last one, at most one item of a sequence in each of the four.

    Usually what one step gave. For a client that is slow it is what several gave, put together.
    """

    seq: int  # 1, 2, 3 … in a session
    accepted: tuple[Accepted, ...]
    rids: bytes  # int64, of the sequences that got tokens and nothing else
    counts: bytes  # int32, how many each got
    ids: bytes  # int32, theirs, one sequence after another
    tokens: tuple[Tokens, ...]  # of those with more to tell: log-probabilities, the end
    failed: tuple[Failed, ...]


class Goodbye(Struct, frozen=True, array_like=True, tag=True):
    """The session is over, or never began. `reason` is one sentence."""

    reason: str


ToPort = Hello | Generate | Cancel | Ack | Bye
ToClient = Welcome | News | Snapshot | Goodbye


def join_logprobs(first: RowLogprobs | None, second: RowLogprobs | None) -> RowLogprobs | None:
    """Those of `first`'s positions, then those of `second`'s."""
    if first is None or second is None:
        return first or second
    assert first.width == second.width, (first.width, second.width)
    return RowLogprobs(first.width, first.ids + second.ids, first.values + second.values)


def join_tokens(first: Tokens, second: Tokens) -> Tokens:
    """Two pieces of news of one sequence as one."""
    return Tokens(
        second.rid,
        first.ids + second.ids,
        join_logprobs(first.logprobs, second.logprobs),
        join_logprobs(first.prompt_logprobs, second.prompt_logprobs),
        second.finish,
        second.stop_token_id,
        second.usage,
    )
