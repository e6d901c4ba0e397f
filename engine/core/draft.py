"""A plan being made, and what is remembered of it until its result is applied."""

from array import array
from collections.abc import Iterator
from itertools import chain
from operator import attrgetter
from typing import NamedTuple

from ...ipc.messages import RowOpen, StepPlan, ids_to_bytes
from .cost import NO_WORK, Work
from .request import Request

_row = attrgetter("row")
_one = array("i", [1])


class InFlight(NamedTuple):
    """What a plan that was sent touches: its rows are `decodes`, one position and one token each, and then `others`.

    Of the first `num_speculative` rows, up to `speculate` positions and tokens more were planned: `num_planned` and
    `num_total` of a request are upper bounds until the result takes back what did not come true."""

    step: int
    decodes: list[Request]
    others: list[Request]
    counts: list[int]  # of others
    sample: list[int]  # of others, 0 or 1
    work: Work | None  # None: what it costs is not to be learnt from
    num_speculative: int
    speculate: int

    def requests(self) -> Iterator[Request]:
        """Whose rows they are, in the plan's order."""
        return chain(self.decodes, self.others)

    @property
    def num_positions(self) -> int:
        """Most that the step computes."""
        return len(self.decodes) + self.num_speculative * self.speculate + sum(self.counts)

    def emptied(self) -> "InFlight":
        """The same rows with nothing to compute: the worker will drop the plan."""
        none = [0] * (len(self.decodes) + len(self.others))
        return InFlight(self.step, [], [*self.decodes, *self.others], none, none, None, 0, 0)


class Draft:
    """A plan being made."""

    def __init__(self, budget: int) -> None:
        self.budget = budget  # tokens left
        self.open: list[RowOpen] = []
        self.grow_rows: array[int] = array("i")
        self.grow_blocks: array[int] = array("i")
        self.decodes: list[Request] = []  # those that need one position, which draws a token
        self.num_speculative = 0  # of them, the first ones: they may compute `speculate` positions more
        self.speculate = 0
        self.break_even = 0.5  # of no account without guesses
        self.others: list[Request] = []
        self.counts: list[int] = []  # of others
        self.sample: list[int] = []  # of others
        self.masks: list[tuple[int, bytes]] = []  # (row, what it may draw)
        self.copies: list[int] = []  # pairs of blocks
        self.pinned: list[int] = []  # blocks that are copied from: not to be given to others by this plan
        self.preempted = False
        self.work = NO_WORK
        self.chunked: list[Request] = []  # those with more than one position
        self.fresh: set[bytes] = set()  # keys of what this plan computes of known ids

    @property
    def num_rows(self) -> int:
        """Rows planned so far."""
        return len(self.decodes) + len(self.others)

    def sent(self, step: int, learns: bool) -> InFlight:
        """What is to be remembered. `learns`: whether what it costs tells something new."""
        return InFlight(
            step,
            self.decodes,
            self.others,
            self.counts,
            self.sample,
            self.work if learns else None,
            self.num_speculative,
            self.speculate,
        )

    def finish(self, step: int, kv: bytes, extension: bytes, after_fault: bool) -> StepPlan:
        """The message."""
        rows = array("i", map(_row, self.decodes))
        rows.extend(map(_row, self.others))
        num_decodes = len(self.decodes)
        return StepPlan(
            step=step,
            open=tuple(self.open),
            grow_rows=self.grow_rows.tobytes(),
            grow_blocks=self.grow_blocks.tobytes(),
            rows=rows.tobytes(),
            counts=(_one * num_decodes).tobytes() + ids_to_bytes(self.counts),
            sample=b"\1" * num_decodes + bytes(self.sample),
            copies=ids_to_bytes(self.copies),
            kv=kv,
            extension=extension,
            num_speculative=self.num_speculative,
            speculate=self.speculate,
            break_even=self.break_even,
            masked_rows=ids_to_bytes([row for row, _ in self.masks]),
            masks=b"".join([mask for _, mask in self.masks]),
            after_fault=after_fault,
        )
