"""Finds the request that kills processes among those that were open when one died.

Requests that were with a process when it died are suspects. They are resumed in small groups, and the next group waits
until every request of the last one has got some more tokens: a death in between was caused in that group. A request
that was present in two deaths, in the second one as the only suspect, is failed, and the same request is refused from
then on.
"""

from collections import deque
from collections.abc import Iterable
from typing import Generic, Protocol, TypeVar

_MAX_TURNS = 8  # groups of suspects with little output; up to this many suspects come one by one
_MAX_SEASONED_TURNS = 3  # groups of the others: a request that kills mostly does so early
_SEASONED = 16  # tokens of output from which a suspect is unlikely to be the killer
_TOKENS = 4  # that each suspect has to get: at a death, this many may have been in the pipeline
_MAX_REMEMBERED = 256  # fingerprints of requests that have killed a process


class Suspect(Protocol):
    """An open request."""

    num_deaths: int  # of processes that may have worked on it
    num_open: int  # sequences that have not ended

    @property
    def num_output(self) -> int:
        """Tokens of output that were delivered."""


S = TypeVar("S", bound=Suspect)


class PoisonDetector(Generic[S]):
    """The suspects of one engine in one api process. True while a group of them is being tried."""

    def __init__(self, killers: dict[bytes, None] | None = None) -> None:
        """`killers`: fingerprints of requests that have killed a process, the latest last; detectors may share them."""
        self._waiting: deque[list[S]] = deque()  # groups that are to be tried, in order
        self._lined_up: set[S] = set()  # who is in them
        self._tried: dict[S, int] = {}  # the group that is being tried → tokens that each still has to get
        self._killers = {} if killers is None else killers

    def __bool__(self) -> bool:
        return bool(self._tried)

    def remember(self, fingerprint: bytes) -> None:
        """A request with this fingerprint has killed a process."""
        self._killers[fingerprint] = None
        if len(self._killers) > _MAX_REMEMBERED:
            del self._killers[next(iter(self._killers))]

    def blame(self, present: Iterable[S]) -> S | None:
        """A process has died while these were with it. The killer, if that is certain."""
        present = list(present)
        blamed = [suspect for suspect in present if suspect in self._tried] or present
        for suspect in blamed:
            suspect.num_deaths += 1
        self._tried.clear()
        self._waiting.clear()
        self._lined_up.clear()
        return blamed[0] if len(blamed) == 1 and blamed[0].num_deaths > 1 else None

    def line_up(self, suspects: Iterable[S]) -> None:
        """Forms the groups: first those that were present in several deaths, one by one; then those with little
        output; then the others."""
        suspects = list(suspects)
        self._lined_up.update(suspects)
        self._waiting.extend([suspect] for suspect in suspects if suspect.num_deaths > 1)
        others = [suspect for suspect in suspects if suspect.num_deaths <= 1]
        fresh = [suspect for suspect in others if suspect.num_output < _SEASONED]
        seasoned = [suspect for suspect in others if suspect.num_output >= _SEASONED]
        for group, max_turns in ((fresh, _MAX_TURNS), (seasoned, _MAX_SEASONED_TURNS)):
            size = -(-len(group) // max_turns)
            self._waiting.extend(group[i : i + size] for i in range(0, len(group), size or 1))

    def is_waiting(self, suspect: S) -> bool:
        """Whether it is in a group that is to be tried."""
        return suspect in self._lined_up

    def next(self) -> list[S]:
        """The group to resume now; empty while another is being tried."""
        if self._tried or not self._waiting:
            return []
        turn = self._waiting.popleft()
        self._lined_up.difference_update(turn)
        self._tried = {suspect: _TOKENS << (2 * suspect.num_deaths - 2) for suspect in turn}
        return turn

    def made_progress(self, suspect: S, num_tokens: int) -> None:
        """The suspect has got `num_tokens`, or has ended."""
        left = self._tried.get(suspect)
        if left is None:
            return
        if left <= num_tokens or not suspect.num_open:
            del self._tried[suspect]
        else:
            self._tried[suspect] = left - num_tokens
