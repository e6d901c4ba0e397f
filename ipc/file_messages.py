"""Messages between a follower that lacks the model's files and the lead, which has them (`procs/model_share.py`).

The follower connects a DEALER socket to a ROUTER of the lead, and asks for one piece after the other. Each frame is one
message, encoded as in `messages`. A connection that breaks may lose messages, so what is not answered is asked again.
"""

from typing import Annotated

from msgspec import Meta, Struct

PIECE_BYTES = 1 << 20

_Count = Annotated[int, Meta(ge=0)]


class ModelFile(Struct, frozen=True, array_like=True):
    """One file of the model."""

    name: Annotated[str, Meta(max_length=1024)]  # model/… or adapter/…, its path in the copy
    size: _Count  # bytes
    mtime_ns: int  # when it was changed, nanoseconds since 1970


# ── follower → lead ──────────────────────────────────────────────────────────────────────────────────────────────────


class ListFiles(Struct, frozen=True, array_like=True, tag=True):
    """Asks which files the model has."""


class ReadFile(Struct, frozen=True, array_like=True, tag=True):
    """Asks for up to `PIECE_BYTES` of a file."""

    number: _Count  # of the file in `Files`
    offset: _Count


# ── lead → follower ──────────────────────────────────────────────────────────────────────────────────────────────────


class Files(Struct, frozen=True, array_like=True, tag=True):
    files: Annotated[tuple[ModelFile, ...], Meta(max_length=100_000)]


class Piece(Struct, frozen=True, array_like=True, tag=True):
    number: _Count
    offset: _Count
    digest: bytes  # SHA-256 of `data`
    data: bytes


class Unreadable(Struct, frozen=True, array_like=True, tag=True):
    """The lead cannot give what was asked for."""

    reason: str  # one sentence


ToShare = ListFiles | ReadFile
FromShare = Files | Piece | Unreadable
