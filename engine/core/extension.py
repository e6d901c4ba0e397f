"""The core half of a plan extension, without torch."""

from collections.abc import Sequence
from typing import Protocol


class PlanExtension(Protocol):
    """Says, plan by plan, what the worker half is to know. The scheduler's thread calls it."""

    def extend(self, step: int, rids: Sequence[int], counts: Sequence[int], starts: Sequence[int]) -> bytes:
        """`StepPlan.extension` of this plan, whose rows are given in the plan's order: whose they are, how many
        positions they compute, and the first of these. Once for each plan that has rows; must not block, nor change or
        keep the columns."""
