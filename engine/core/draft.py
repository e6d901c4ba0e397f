"""A plan being made, and what is remembered of it until its result is applied."""

from array import array
from typing import NamedTuple

from ...ipc.messages import RowOpen
from .cost import Work
from .request import Request


class InFlight(NamedTuple):
    """What a plan that was sent touches."""

    step: int
    requests: list[Request]
    counts: list[int]
    sample: list[int]
    work: Work


class Draft:
    """A plan being made."""

    def __init__(self, budget: int) -> None:
        self.budget = budget  # tokens left
        self.open: list[RowOpen] = []
        self.grow_rows: array[int] = array("i")
        self.grow_blocks: array[int] = array("i")
        self.requests: list[Request] = []
        self.rows: array[int] = array("i")
        self.counts: list[int] = []
        self.sample: list[int] = []
        self.preempted = False
        self.work = Work(0, 0, 0, 0)
        self.chunked: list[Request] = []  # those with more than one position
        self.fresh: set[bytes] = set()  # keys of the blocks that this plan fills with known ids
