"""Constraints of outputs, and the messages between the core and the grammar process.

`messages` has all names of this file.

    core ─Constrain, Sampled─▶ grammar ─Constrained, Masks─▶ core
"""

from typing import Annotated, Literal

from msgspec import Meta, Struct

from ..errors import ErrorKind

MAX_GRAMMAR_BYTES = 1 << 18  # of `Constraint.text`
MAX_BAD_SEQUENCES = 2048  # a bad word at the start of a text and after a space
_Mark = Annotated[str, Meta(max_length=256)]


class Source(Struct, frozen=True, array_like=True):
    """The field of the client's request that a part of a constraint's text is from."""

    field: _Mark  # as errors name it, such as tools[3].function.parameters
    tool: _Mark = ""  # the function whose parameters it describes
    # The schema, as JSON, that is enforced if this one cannot be; "": the request is refused.
    instead: _Mark = ""


class Constraint(Struct, frozen=True, array_like=True):
    """What an output must match. The grammar process compiles it and follows the output."""

    kind: Literal["none", "json_schema", "json_object", "regex", "choice", "lark"] = "none"  # none: only other fields
    # The schema as JSON, the pattern, the choices as a JSON list, or the grammar.
    text: Annotated[str, Meta(max_length=MAX_GRAMMAR_BYTES)] = ""
    # Ends of reasoning: the grammar starts after the first of them; (): at once.
    reasoning_ends: Annotated[tuple[_Mark, ...], Meta(max_length=16)] = ()
    # What opens reasoning in an output (a prompt may have opened it already).
    reasoning_starts: Annotated[tuple[_Mark, ...], Meta(max_length=16)] = ()
    thinking_budget: Annotated[int, Meta(ge=0)] | None = None  # reasoning tokens after which its end is forced
    # int32 ids of each sequence that must not appear.
    bad_words: Annotated[tuple[Annotated[bytes, Meta(max_length=8192)], ...], Meta(max_length=MAX_BAD_SEQUENCES)] = ()
    lark_marks: tuple[str, ...] = ()  # in a lark text, what its rules mark0, mark1 … stand for; else, what comes first
    # Of `text`; with rules of our own (lark and marks): of each line's schema, in order.
    sources: tuple[Source, ...] = ()


class Constrain(Struct, frozen=True, array_like=True, tag=True):
    """core → grammar: the sequences `rid` … `rid + n - 1` must match this. `Constrained` answers, then `Masks`."""

    rid: int
    n: int
    constraint: Constraint
    tail_ids: bytes  # int32, the last ids of the prompt: a template may have begun the reasoning already
    resume_ids: bytes = b""  # int32, output that was delivered before


class Sampled(Struct, frozen=True, array_like=True, tag=True):
    """core → grammar: what constrained sequences sampled, one token each, and which of them have ended.

    One may have ended before its `Constrained` came: its grammar need not be compiled then."""

    rids: bytes  # int64
    ids: bytes  # int32, parallel to rids
    ended: bytes  # int64


class Constrained(Struct, frozen=True, array_like=True, tag=True):
    """grammar → core: the sequences of a `Constrain` may start, or `kind` and `detail` say why not."""

    rid: int
    kind: ErrorKind | None = None
    detail: str = ""
    param: str = ""  # see `Failed`


class Masks(Struct, frozen=True, array_like=True, tag=True):
    """grammar → core: what constrained sequences may sample next. A sequence is in one of the four fields."""

    rids: bytes  # int64, of those that may sample what their bits allow
    bits: bytes  # int32 [rids × ⌈vocab / 32⌉]; bit t % 32 of word t / 32: token t is allowed
    free: bytes = b""  # int64, of those that may sample any token
    complete: bytes = b""  # int64, of those to which nothing can be added: they end
    failed: tuple[tuple[int, ErrorKind, str], ...] = ()  # (rid, kind, one sentence for the client)
