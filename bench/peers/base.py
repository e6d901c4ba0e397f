"""What a peer is: something that can be started on a checkpoint, asked for streams of tokens, and stopped."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

START_TIMEOUT_S = 300.0
RUN_TIMEOUT_S = 900.0  # of all requests of a workload
CONVERT_TIMEOUT_S = 900.0


class PeerError(Exception):
    """A peer failed; one sentence. The others continue without it."""


@dataclass(frozen=True)
class Request:
    """Greedy, and never ended by an eos."""

    prompt: list[int]
    num_tokens: int  # of output, exactly


@dataclass(frozen=True)
class Stream:
    """The outcome of a request. Times are seconds of one clock for all streams of a run."""

    sent: float
    times: list[float]  # of what arrived: one token each, or a few where a server puts them into one event
    num_tokens: int


@dataclass(frozen=True)
class Load:
    """What a peer is started for."""

    folder: Path  # the checkpoint
    converted: Path  # what `Peer.convert` made of it
    num_streams: int  # most at once
    max_len: int  # longest prompt + output, in tokens
    kv_bytes: int  # for KV, if the peer allows it to be set
    log: Path  # where its output goes


class Meter(Protocol):
    """What a peer's processes took since they started."""

    def cpu_seconds(self) -> float:
        """User and system, of all of them, those that ended included."""

    def peak_bytes(self) -> int:
        """Most memory at one time, shared pages counted once."""


class Running(Protocol):
    """A started peer. Whoever started it calls `stop`, always."""

    @property
    def meter(self) -> Meter:
        """Over its whole tree of processes."""

    def wait_ready(self) -> None:
        """Until it would answer. Raises PeerError when it ends instead or takes too long."""

    def run(self, requests: Sequence[Request]) -> list[Stream]:
        """Sends all at once and waits for all. Raises PeerError."""

    def stop(self) -> None:
        """Ends all of its processes; may be called at any time, more than once."""


class Peer(Protocol):
    """One engine."""

    @property
    def name(self) -> str:
        """As in the table."""

    def missing(self) -> str:
        """How to install what is missing; empty when it can run."""

    def convert(self, folder: Path) -> Path:
        """The checkpoint in the peer's own format, made once and kept beside it. Raises PeerError."""

    def start(self, load: Load) -> Running:
        """Starts it without waiting."""
