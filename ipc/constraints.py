"""What an output must keep to, and what the core and the grammar process tell each other of it.

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
    """Which field of the client's request a part of a constraint's text is from."""

    field: _Mark  # as errors name it, such as tools[3].function.parameters
    tool: _Mark = ""  # the function whose parameters it describes
    instead: _Mark = (
        ""  # the schema, as JSON, that is enforced in its place if it cannot be; "": the request is refused
    )


class Constraint(Struct, frozen=True, array_like=True):
    """What the output must keep to besides the model's own taste. Compiled and followed by the grammar process."""

    kind: Literal["none", "json_schema", "json_object", "regex", "choice", "lark"] = "none"  # none: only what follows
    text: Annotated[str, Meta(max_length=MAX_GRAMMAR_BYTES)] = (
        ""  # the schema as JSON, the pattern, the choices as a JSON list, the grammar
    )
    reasoning_ends: Annotated[
        tuple[_Mark, ...], Meta(max_length=16)
    ] = ()  # the grammar starts after the first of these; (): at once
    reasoning_starts: Annotated[
        tuple[_Mark, ...], Meta(max_length=16)
    ] = ()  # what opens reasoning in an output (a prompt may have opened it already)
    thinking_budget: Annotated[int, Meta(ge=0)] | None = None  # tokens of reasoning after which its end is forced
    bad_words: Annotated[
        tuple[Annotated[bytes, Meta(max_length=8192)], ...], Meta(max_length=MAX_BAD_SEQUENCES)
    ] = ()  # int32 ids of each sequence that must not appear
    lark_marks: tuple[str, ...] = ()  # in a lark text, what its rules mark0, mark1 … stand for; else, what comes first
    sources: tuple[
        Source, ...
    ] = ()  # of `text`; with rules of our own (lark and marks): of each line's schema, in order


class Constrain(Struct, frozen=True, array_like=True, tag=True):
    """core → grammar: the sequences `rid` … `rid + n - 1` are to keep to this. `Constrained` answers, then `Masks`."""

    rid: int
    n: int
    constraint: Constraint
    tail_ids: bytes  # int32, the last ids of the prompt: a template may have begun the reasoning already
    resume_ids: bytes = b""  # int32, output that is there already


class Sampled(Struct, frozen=True, array_like=True, tag=True):
    """core → grammar: what constrained sequences drew, one token each, and which of them are over.

    One that `Constrained` has not told of yet may be over, too: its grammar is not compiled then."""

    rids: bytes  # int64
    ids: bytes  # int32, parallel to rids
    ended: bytes  # int64


class Constrained(Struct, frozen=True, array_like=True, tag=True):
    """grammar → core: the sequences of a `Constrain` may begin, or `kind` and `detail` say why not."""

    rid: int
    kind: ErrorKind | None = None
    detail: str = ""
    param: str = ""  # see `Failed`


class Masks(Struct, frozen=True, array_like=True, tag=True):
    """grammar → core: what constrained sequences may draw next, each in one of the four."""

    rids: bytes  # int64, of those that may draw what their bits say
    bits: bytes  # int32 [rids × ⌈vocab / 32⌉]; bit t % 32 of word t / 32: token t is allowed
    free: bytes = b""  # int64, of those that may draw anything
    complete: bytes = b""  # int64, of those to which nothing can be added: they end here
    failed: tuple[tuple[int, ErrorKind, str], ...] = ()  # (rid, kind, one sentence for the client)
