"""The protocol of a peer: an engine that can be started on a checkpoint, run on requests, and stopped."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

START_TIMEOUT_S = 300.0
RUN_TIMEOUT_S = 900.0  # of all requests of a workload
CONVERT_TIMEOUT_S = 900.0


class PeerError(Exception):
    """A peer failed; one sentence. The other peers are still measured."""


@dataclass(frozen=True)
class Request:
    """A greedy request that ignores eos."""

    prompt: list[int]
    num_tokens: int  # of output, exactly


@dataclass(frozen=True)
class Stream:
    """The result of a request. Times are seconds of one clock for all streams of a run."""

    sent: float
    times: list[float]  # of the arrivals: one token each, or several if a server puts them into one event
    num_tokens: int


@dataclass(frozen=True)
class Load:
    """The checkpoint and the sizes with which a peer is started."""

    folder: Path  # the checkpoint
    converted: Path  # the result of `Peer.convert`
    num_streams: int  # most at once
    max_len: int  # longest prompt + output, in tokens
    kv_bytes: int  # KV memory, if the peer has such an option
    log: Path  # for the peer's output


class Meter(Protocol):
    """The resources that a peer's processes have used since they started."""

    def cpu_seconds(self) -> float:
        """User and system time of all processes, including those that have ended."""

    def peak_bytes(self) -> int:
        """The largest total memory at one time; shared pages count once."""


class Running(Protocol):
    """A started peer. The caller must always call `stop`."""

    @property
    def meter(self) -> Meter:
        """Covers its whole tree of processes."""

    def wait_ready(self) -> None:
        """Returns when it can answer. Raises PeerError if it ends or takes too long."""

    def run(self, requests: Sequence[Request]) -> list[Stream]:
        """Sends all at once and waits for all. Raises PeerError."""

    def stop(self) -> None:
        """Ends all of its processes; may be called at any time and repeatedly."""


class Peer(Protocol):
    """One engine."""

    @property
    def name(self) -> str:
        """The name in the table."""

    def missing(self) -> str:
        """How to install what it needs; empty if it can run."""

    def convert(self, folder: Path) -> Path:
        """The checkpoint in the peer's own format, written once and kept. Raises PeerError."""

    def start(self, load: Load) -> Running:
        """Starts it without waiting."""
