"""What a worker asks of the keeper of its weights, and how: messages over a Unix socket.

The keeper (`procs/weight_keeper.py`) holds allocations and nothing else. Those that a connection asked for are freed
with the connection, unless the worker has them kept under a token. Then a worker that replaces it opens them. Without
torch, because the keeper has none.
"""

import contextlib
import os
import socket
from types import TracebackType
from typing import NamedTuple

import msgspec
from msgspec import Struct

from .allocations import AllocationError

MAX_MESSAGE = 1 << 16
_ANSWER_S = 60.0  # an allocation of a GiB takes milliseconds


class Allocate(Struct, frozen=True, array_like=True, tag=True):
    """Answered with the allocation's descriptor."""

    kind: str  # see `allocations.memory_of`
    num_bytes: int


class Keep(Struct, frozen=True, array_like=True, tag=True):
    """Has this connection's allocations kept, instead of those that were kept before."""

    token: bytes


class Open(Struct, frozen=True, array_like=True, tag=True):
    """Answered with the descriptor of one of the allocations that are kept under this token."""

    token: bytes
    number: int  # from 0, in the order in which they were asked for


class Drop(Struct, frozen=True, array_like=True, tag=True):
    """Frees this connection's allocations."""

    kept: bool  # and those that are kept


class Count(Struct, frozen=True, array_like=True, tag=True):
    """Answered with the bytes that are kept."""


Request = Allocate | Keep | Open | Drop | Count


class Answer(Struct, frozen=True, array_like=True):
    """Each request has one. A descriptor travels with it if one was asked for and there is no problem."""

    num_bytes: int = 0
    problem: str = ""


class Received(NamedTuple):
    """An allocation of the keeper. The receiver closes the descriptor."""

    fd: int
    num_bytes: int


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Answer).decode


class Keeper:
    """A worker's connection to its keeper. All calls raise AllocationError, also if the keeper has ended."""

    def __init__(self, address: str) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.settimeout(_ANSWER_S)
        try:
            self._socket.connect(address)
        except OSError as error:
            self._socket.close()
            raise AllocationError(f"the keeper does not answer: {error.strerror or error}") from error

    def allocate(self, kind: str, num_bytes: int) -> Received:
        """At least so many bytes."""
        return self._received(Allocate(kind, num_bytes))

    def keep(self, token: bytes) -> None:
        self._ask(Keep(token))

    def open(self, token: bytes, number: int) -> Received:
        return self._received(Open(token, number))

    def drop(self, *, kept: bool) -> None:
        self._ask(Drop(kept))

    def num_kept(self) -> int:
        """Bytes."""
        return self._ask(Count())[0].num_bytes

    def close(self) -> None:
        self._socket.close()

    def __enter__(self) -> "Keeper":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _received(self, request: Request) -> Received:
        answer, fds = self._ask(request)
        if len(fds) != 1:
            raise AllocationError(f"the keeper sent {len(fds)} descriptors instead of one")
        return Received(fds[0], answer.num_bytes)

    def _ask(self, request: Request) -> tuple[Answer, list[int]]:
        fds: list[int] = []
        try:
            self._socket.send(_encode(request))
            data, fds, _, _ = socket.recv_fds(self._socket, MAX_MESSAGE, 1)
            answer = _decode(data)
        except (OSError, msgspec.MsgspecError) as error:
            for fd in fds:
                os.close(fd)
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)  # a late answer would be taken for that of the next request
            raise AllocationError(f"the keeper has ended or does not answer ({type(error).__name__})") from error
        if answer.problem:
            raise AllocationError(answer.problem)
        return answer, fds
