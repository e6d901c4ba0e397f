"""A measured number, what it should be, and what came of it. Plain Python: the parent of the parts imports no torch."""

from dataclasses import dataclass
from typing import Literal

Verdict = Literal["met", "missed", "measured", "skipped", "failed"]


class SkippedError(Exception):
    """A part that cannot run here; the text says why, in one sentence."""


@dataclass(frozen=True, kw_only=True)
class Figure:
    """One number. A NaN meets no target."""

    name: str
    value: float
    unit: str
    least: float | None = None  # the target
    most: float | None = None
    is_proof: bool = False  # of something that is right or wrong on any machine; the others say how fast this one is

    @property
    def target(self) -> str:
        if self.least is not None:
            return f"≥ {self.least:g}"
        return "" if self.most is None else f"≤ {self.most:g}"

    def verdict(self, *, smoke: bool) -> Verdict:
        """smoke: speed is not judged."""
        if not self.target or (smoke and not self.is_proof):
            return "measured"
        above = self.least is None or self.value >= self.least
        below = self.most is None or self.value <= self.most
        return "met" if above and below else "missed"


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What one part came to."""

    part: str
    title: str
    seconds: float
    figures: tuple[Figure, ...] = ()  # up to where it ended, if it failed
    skipped: str = ""  # why
    failed: str = ""  # why

    def verdict(self, *, smoke: bool) -> Verdict:
        """The worst of its figures' if it went to its end."""
        if self.failed:
            return "failed"
        found = [figure.verdict(smoke=smoke) for figure in self.figures]
        for verdict in ("missed", "met", "measured"):
            if verdict in found:
                return verdict
        return "skipped"

    def is_right(self) -> bool:
        """Whether it went to its end, or was skipped, and disproved nothing; a target of speed may be missed."""
        missed = [figure for figure in self.figures if figure.is_proof and figure.verdict(smoke=True) == "missed"]
        return not self.failed and not missed
