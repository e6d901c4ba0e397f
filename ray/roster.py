"""Which engines a door knows. No Ray, no HTTP, no clock.

Each engine says every second that it is there, to a registry that forgets everything when it is replaced. So an engine
that a registry does not name may well be there: a door drops it only after a while, or when it is said to leave.
"""

from collections.abc import Iterable, Mapping

FORGET_S = 15.0  # without a word of an engine


class Registry:
    """What the engines say, of the last seconds."""

    def __init__(self) -> None:
        self._said: dict[str, tuple[float, bool]] = {}

    def announce(self, url: str, is_leaving: bool, now: float) -> None:
        """An engine is there, or takes no new requests from now on."""
        was_leaving = self._said.get(url, (0.0, False))[1]
        self._said[url] = now, is_leaving or was_leaving

    def engines(self, now: float) -> dict[str, bool]:
        """URL → whether it leaves."""
        self._said = {url: said for url, said in self._said.items() if now - said[0] < FORGET_S}
        return {url: is_leaving for url, (_, is_leaving) in self._said.items()}


class Roster:
    """The engines of one door."""

    def __init__(self) -> None:
        self._heard_at: dict[str, float] = {}

    def hear(self, said: Mapping[str, bool], now: float) -> tuple[list[str], list[str]]:
        """`said`: URL → whether it leaves. Returns the engines to add, and those to remove."""
        added = [url for url, is_leaving in said.items() if not is_leaving and url not in self._heard_at]
        self._heard_at |= {url: now for url, is_leaving in said.items() if not is_leaving}
        removed = [url for url, at in self._heard_at.items() if said.get(url, False) or now - at > FORGET_S]
        self._drop(removed)
        return added, removed

    def _drop(self, urls: Iterable[str]) -> None:
        for url in urls:
            del self._heard_at[url]
