"""The core half of a plan extension, without torch."""

from collections.abc import Sequence
from typing import Protocol


class PlanExtension(Protocol):
    """Gives each plan its bytes for the worker half. The scheduler's thread calls it."""

    def extend(self, step: int, rids: Sequence[int], counts: Sequence[int], starts: Sequence[int]) -> bytes:
        """`StepPlan.extension` of this plan. The columns have an entry for each row, in the plan's order: its rid, how
        many positions it computes, and the first of them. Called once for each plan that has rows; must not block, nor
        change or keep the columns."""
