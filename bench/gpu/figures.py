"""A measured number, its target and the verdict. Imports no torch, because the parent of the parts imports this."""

from dataclasses import dataclass
from typing import Literal

Verdict = Literal["met", "missed", "measured", "skipped", "failed"]


class SkippedError(Exception):
    """A part cannot run here; the text is one sentence with the reason."""


@dataclass(frozen=True, kw_only=True)
class Figure:
    """One number. A NaN meets no target."""

    name: str
    value: float
    unit: str
    least: float | None = None  # the target
    most: float | None = None
    is_proof: bool = False  # it shows correctness, on any machine; other figures measure this machine's speed

    @property
    def target(self) -> str:
        if self.least is not None:
            return f"≥ {self.least:g}"
        return "" if self.most is None else f"≤ {self.most:g}"

    def verdict(self, *, smoke: bool) -> Verdict:
        """`smoke`: figures of speed get no verdict."""
        if not self.target or (smoke and not self.is_proof):
            return "measured"
        above = self.least is None or self.value >= self.least
        below = self.most is None or self.value <= self.most
        return "met" if above and below else "missed"


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The result of one part."""

    part: str
    title: str
    seconds: float
    figures: tuple[Figure, ...] = ()  # those before the failure, if it failed
    skipped: str = ""  # why
    failed: str = ""  # why

    def verdict(self, *, smoke: bool) -> Verdict:
        """ "failed", or the worst verdict of its figures."""
        if self.failed:
            return "failed"
        found = [figure.verdict(smoke=smoke) for figure in self.figures]
        for verdict in ("missed", "met", "measured"):
            if verdict in found:
                return verdict
        return "skipped"

    def is_right(self) -> bool:
        """Whether it did not fail and missed no target of correctness; it may miss targets of speed or be skipped."""
        missed = [figure for figure in self.figures if figure.is_proof and figure.verdict(smoke=True) == "missed"]
        return not self.failed and not missed
