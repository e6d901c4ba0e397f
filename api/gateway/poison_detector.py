"""Which open requests may have killed a process, and how the one that did is found.

Requests that were with a process when it died are suspects. They come back a few at a time, and the next ones wait
until those have got some tokens further than they had: a death in between is theirs alone. One that was there in two
deaths and cannot have been anybody else's victim is failed, and what asks for the same again is refused.
"""

from collections import deque
from collections.abc import Iterable
from typing import Generic, Protocol, TypeVar

_MAX_TURNS = 8  # in which those come back that had hardly begun; up to so many come one by one
_MAX_SEASONED_TURNS = 3  # in which the others do: what kills mostly does so early
_SEASONED = 16  # tokens of output that somebody has who is hardly the one
_TOKENS = 4  # that each has to get; a death's last tokens were on their way through the pipeline
_MAX_REMEMBERED = 256  # fingerprints of requests that have killed


class Suspect(Protocol):
    """A request that is open."""

    num_deaths: int  # of processes that it was with
    num_open: int  # sequences that have not ended

    @property
    def num_output(self) -> int:
        """Tokens that were delivered of it."""


S = TypeVar("S", bound=Suspect)


class PoisonDetector(Generic[S]):
    """Of one api process."""

    def __init__(self) -> None:
        self._waiting: deque[list[S]] = deque()  # those that come back together, in their order
        self._tried: dict[S, int] = {}  # who came back last → tokens that it still has to get
        self._killers: dict[bytes, None] = {}  # fingerprints, the last one at the end

    def __bool__(self) -> bool:
        """Some are being tried."""
        return bool(self._tried)

    @property
    def are_known(self) -> bool:
        """There is a request that would be refused."""
        return bool(self._killers)

    def has_killed(self, fingerprint: bytes) -> bool:
        """Such a request has killed before."""
        return fingerprint in self._killers

    def remember(self, fingerprint: bytes) -> None:
        """Such a request has killed."""
        self._killers[fingerprint] = None
        if len(self._killers) > _MAX_REMEMBERED:
            del self._killers[next(iter(self._killers))]

    def blame(self, present: Iterable[S]) -> S | None:
        """A process has died with these. Who did it, if that is certain."""
        present = list(present)
        blamed = [suspect for suspect in present if suspect in self._tried] or present
        for suspect in blamed:
            suspect.num_deaths += 1
        self._tried.clear()
        self._waiting.clear()
        return blamed[0] if len(blamed) == 1 and blamed[0].num_deaths > 1 else None

    def line_up(self, poison_detector: Iterable[S]) -> None:
        """They shall come back in this order: those that were there in several deaths one by one, then those that had
        hardly begun, then those that have gone well for a while."""
        poison_detector = list(poison_detector)
        self._waiting.extend([suspect] for suspect in poison_detector if suspect.num_deaths > 1)
        others = [suspect for suspect in poison_detector if suspect.num_deaths <= 1]
        fresh = [suspect for suspect in others if suspect.num_output < _SEASONED]
        seasoned = [suspect for suspect in others if suspect.num_output >= _SEASONED]
        for group, most_turns in ((fresh, _MAX_TURNS), (seasoned, _MAX_SEASONED_TURNS)):
            size = -(-len(group) // most_turns)
            self._waiting.extend(group[i : i + size] for i in range(0, len(group), size or 1))

    def next(self) -> list[S]:
        """Who comes back now; nobody while others are tried."""
        if self._tried or not self._waiting:
            return []
        turn = self._waiting.popleft()
        self._tried = {suspect: _TOKENS << (2 * suspect.num_deaths - 2) for suspect in turn}
        return turn

    def got_on(self, suspect: S, num_tokens: int) -> None:
        """It has got tokens, or has ended."""
        left = self._tried.get(suspect)
        if left is None:
            return
        if left <= num_tokens or not suspect.num_open:
            del self._tried[suspect]
        else:
            self._tried[suspect] = left - num_tokens
