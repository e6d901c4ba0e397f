"""A plan under construction, and what is remembered of it until its result is applied."""

from array import array
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import NamedTuple

from ...ipc.messages import RowOpen, StepPlan, ids_to_bytes
from .cost import NO_WORK, Work, with_chunk
from .request import Request

_one = array("i", [1])


class InFlight(NamedTuple):
    """A plan that was sent. Its rows are `decodes`, one position and one token each, and then `others`.

    For each of the first `num_speculative` rows, up to `speculate` positions and tokens more were planned: until the
    result is applied, `num_planned` and `num_total` of these requests are upper bounds."""

    step: int
    decodes: list[Request]
    others: list[Request]
    counts: list[int]  # positions of each of others
    sample: list[int]  # tokens of each of others: 0 or 1
    work: Work | None  # None: the cost model does not learn from this step
    num_speculative: int
    speculate: int
    kept: list[tuple[int, bytes]] = []  # block and key of each recurrent state that it keeps  # noqa: RUF012
    pages_read: float = 0.0  # of the cache

    def requests(self) -> Iterator[Request]:
        """Those of its rows, in order."""
        return chain(self.decodes, self.others)

    @property
    def num_positions(self) -> int:
        """The most that the step computes."""
        return len(self.decodes) + self.num_speculative * self.speculate + sum(self.counts)

    def emptied(self) -> "InFlight":
        """The same rows with nothing to compute: the worker will drop the plan."""
        none = [0] * (len(self.decodes) + len(self.others))
        return InFlight(self.step, [], [*self.decodes, *self.others], none, none, None, 0, 0)


class Kept(NamedTuple):
    """A recurrent state that a plan keeps."""

    request: Request
    position: int  # after so many positions
    key: bytes
    slot: int  # its block
    is_grid: bool  # nobody has asked for a state there


class PlanBuilder:
    """A plan under construction."""

    def __init__(self, budget: int) -> None:
        self.budget = budget  # positions left
        self.open: list[RowOpen] = []
        self.grow_rows: array[int] = array("i")
        self.grow_groups: array[int] = array("i")
        self.grow_blocks: array[int] = array("i")  # pages
        self.decodes: list[Request] = []  # rows that compute one position and sample a token
        self.num_speculative = 0  # the first of `decodes`, which may compute `speculate` positions more
        self.speculate = 0
        self.break_even = 0.5  # of no account without draft tokens
        self.others: list[Request] = []
        self.counts: list[int] = []  # positions of each of others
        self.sample: list[int] = []  # tokens of each of others: 0 or 1
        self.masks: list[tuple[int, bytes]] = []  # (row, the mask of the token that it samples)
        self.late: list[Request] = []  # those of others that sample a token whose mask has not come
        self.copies: list[int] = []  # pairs of pages
        self.pinned: list[int] = []  # blocks that are copied from: this plan must not give them away
        self.keep_rows: array[int] = array("i")
        self.keep_positions: array[int] = array("i")
        self.keep_pages: array[int] = array("i")
        self.kept: list[Kept] = []
        self.preempted = False
        self.work = NO_WORK
        self.num_encoded = 0
        self.encoder_budget = budget  # tokens that an encoder may read yet, beside the positions of the budget
        self.chunked: list[Request] = []  # those of others with more than one position
        self.fresh: set[bytes] = set()  # keys of the blocks that this plan computes from known ids

    @property
    def num_rows(self) -> int:
        """Rows planned so far."""
        return len(self.decodes) + len(self.others)

    def may_encode(self, num: int) -> bool:
        """Whether an encoder may read so many tokens of one prompt more: the first prompt of a plan may be longer than
        the budget, since no prompt is read in parts."""
        return num <= self.encoder_budget or self.num_encoded == 0

    def encode(self, num: int) -> None:
        """An encoder reads a prompt of so many tokens before the pass."""
        self.encoder_budget -= num
        self.num_encoded += num
        self.work = with_chunk(self.work, 0, num)

    def grow(self, rows: Sequence[int], group: int, pages: Sequence[int]) -> None:
        """Tells the worker that a block of this group was appended to the table of each of these rows."""
        self.grow_rows.extend(rows)
        if group or self.grow_groups:
            self.grow_groups.extend([0] * (len(self.grow_rows) - len(rows) - len(self.grow_groups)))
            self.grow_groups.extend([group] * len(rows))
        self.grow_blocks.extend(pages)

    def copy(self, source: Sequence[int], target: Sequence[int]) -> None:
        """The worker copies the pages of one block to those of another."""
        self.copies += chain.from_iterable(zip(source, target, strict=True))

    def keep(self, kept: "Kept", pages: Sequence[int]) -> None:
        """The worker stores the recurrent state of a request after these positions in these pages, which are held."""
        self.keep_rows.append(kept.request.row)
        self.keep_positions.append(kept.position)
        self.keep_pages.extend(pages)
        self.kept.append(kept)

    def sent(self, step: int, learns: bool, pages_read: float = 0.0) -> InFlight:
        """What is to be remembered. `learns`: the cost model learns from this step. `pages_read`: see `InFlight`."""
        work = self.work if learns else None
        kept = [(kept.slot, kept.key) for kept in self.kept]
        return InFlight(
            step, self.decodes, self.others, self.counts, self.sample, work, self.num_speculative, self.speculate, kept,
            pages_read,
        )  # fmt: skip

    def finish(self, step: int, kv: bytes, extension: bytes, after_fault: bool) -> StepPlan:
        """The message."""
        rows = array("i", [request.row for request in self.decodes])
        rows.extend([request.row for request in self.others])
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
            grow_groups=self.grow_groups.tobytes(),
            keep_rows=self.keep_rows.tobytes(),
            keep_positions=self.keep_positions.tobytes(),
            keep_pages=self.keep_pages.tobytes(),
            late_rows=ids_to_bytes([request.row for request in self.late]),
        )
