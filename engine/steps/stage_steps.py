"""One stage's part of a plan. Stages compute the layers of a model one after the other, and each has its own rows.

Every stage is sent every plan, so block tables and positions need no exchange. Only two things do: what the layers
before have computed (`Passed`), and the ids that the last stage samples (`SampledIds`), which the first one embeds. The
first stage knows all ids of a row before it runs the row again, so it also proposes the draft tokens.
"""

from collections import deque
from dataclasses import dataclass, field
from typing import cast

import numpy as np
import torch
from msgspec import structs
from numpy.typing import NDArray
from torch import Tensor

from ...config.config import Dtype
from ...ipc.messages import Hidden, SampledIds, StepPlan
from ..attention.base import AttentionBackend
from ..executors.base import DescribedModel
from ..parallel.stage_memory import StageMemory
from .host_steps import HostSteps
from .ngram import learn
from .sampled import Sampled


def _none() -> NDArray[np.int64]:
    return np.zeros(0, np.int64)


@dataclass(frozen=True)
class Passed:
    """What a stage sends to the next one."""

    states: Tensor | None  # [tokens, columns]; None: the plan has no rows
    # [plan's rows] the first position of each; empty: rows never have draft tokens
    starts: NDArray[np.int64] = field(default_factory=_none)
    num_drafts: NDArray[np.int64] = field(default_factory=_none)  # [speculative rows]; empty: there are none
    draft_ids: NDArray[np.int64] = field(default_factory=_none)  # those of all rows

    def message(self, step: int, memory: StageMemory | None) -> Hidden:
        """memory: where the next stage reads the states; None: they are part of the message."""
        columns = (self.starts, self.num_drafts, self.draft_ids)
        starts, num_drafts, ids = (column.astype("<i4").tobytes() for column in columns)
        if self.states is None:
            return Hidden(step, 0.0, starts, num_drafts, ids)
        dtype = cast(Dtype, str(self.states.dtype).removeprefix("torch."))
        message = Hidden(step, 0.0, starts, num_drafts, ids, self.states.shape[1], dtype)
        states = self.states.contiguous()
        if memory is not None and states.nbytes <= memory.slot_bytes:
            torch.frombuffer(memory.slot(step, states.nbytes), dtype=states.dtype).view_as(states).copy_(states)
            return structs.replace(message, num_tokens=len(states))
        return structs.replace(message, data=states.view(torch.uint8).numpy().tobytes())


@dataclass(frozen=True)
class _Unanswered:
    """A step of the first stage whose ids are not known yet. The first four are [sampling rows]."""

    step: int
    rows: NDArray[np.int64]
    ends: NDArray[np.int64]  # position of the first sampled token
    places: NDArray[np.int64]  # index into the plan's rows
    num_drafts: NDArray[np.int64]  # [speculative rows]
    speculative: NDArray[np.int64]  # these rows
    break_even: float


class StageSteps:
    """Calls come in the order of the plans."""

    def __init__(
        self, steps: HostSteps, model: DescribedModel, attention: AttentionBackend, *, is_first: bool, is_last: bool,
        speculates: bool,
    ) -> None:  # fmt: skip
        """steps: on the cache of this stage. speculates: plans may have speculative rows."""
        self._steps, self._model, self._attention = steps, model, attention
        self._is_first, self._is_last = is_first, is_last
        self._speculates = speculates
        num_rows = len(steps.rows.num_ids)
        self._unanswered: deque[_Unanswered] = deque()
        self._num_unknown: NDArray[np.int64] = np.zeros(num_rows, np.int64)  # steps in `_unanswered` that sample a row
        self._opened_at: NDArray[np.int64] = np.full(num_rows, -1)  # the step that opened each row

    def knows_ids(self, plan: StepPlan) -> bool:
        """Whether the first stage can embed all tokens of a plan."""
        if not self._unanswered:
            return True
        unknown = self._num_unknown.copy()
        unknown[[row.row for row in plan.open]] = 0
        return not unknown[np.frombuffer(plan.rows, "<i4")].any()

    def take_ids(self, message: SampledIds) -> None:
        """What the last stage has sampled. Rows that were opened since are not changed."""
        if not self._unanswered or self._unanswered[0].step != message.step:
            return  # this stage has run no pass for that step
        asked = self._unanswered.popleft()
        is_open = self._opened_at[asked.rows] <= message.step
        self._num_unknown[asked.rows[is_open]] -= 1
        if message.fault is not None:
            return
        ids = np.frombuffer(message.ids, "<i4").astype(np.int64)
        nums = np.frombuffer(message.num_sampled, "<i4").astype(np.int64)
        if not len(nums):
            nums = np.ones(len(asked.rows), np.int64)
        if len(asked.num_drafts):
            self._learn(asked, nums, is_open)
        firsts = np.cumsum(nums) - nums
        ends = np.repeat(asked.ends - firsts, nums) + np.arange(len(ids))
        kept, rows = np.repeat(is_open, nums), self._steps.rows
        picked, ends, ids = np.repeat(asked.rows, nums)[kept], ends[kept], ids[kept]
        rows.ids[picked, ends] = np.maximum(ids, 0)
        rows.num_computed[picked] = ends  # NumPy keeps the last of a row's assignments
        rows.num_ids[picked] = ends + 1

    def _learn(self, asked: _Unanswered, nums: NDArray[np.int64], is_open: NDArray[np.bool_]) -> None:
        """Adjusts the draft levels of the rows."""
        of_row = dict(zip(asked.places[is_open].tolist(), nums[is_open].tolist(), strict=True))
        made = [place for place in np.flatnonzero(asked.num_drafts).tolist() if place in of_row]
        good = [of_row[place] - 1 >= asked.break_even * asked.num_drafts[place] for place in made]
        if made:
            learn(self._steps.rows, asked.speculative[made], np.array(good, np.bool_), asked.break_even)

    def run(self, plan: StepPlan, received: Passed | None) -> Passed | Sampled:
        """This stage's layers. received: None in the first stage."""
        steps = self._steps
        steps.begin(plan)
        for row in plan.open:
            self._opened_at[row.row], self._num_unknown[row.row] = plan.step, 0
        if not plan.rows:
            return Sampled({}) if self._is_last else Passed(None)
        planned = np.frombuffer(plan.rows, "<i4").astype(np.int64)
        num_drafts = steps.propose(plan) if received is None else self._take_drafts(plan, planned, received)
        starts = steps.rows.num_computed[planned]
        step = steps.inputs(plan, num_drafts)
        states = self._model.stage(
            step.ids, step.positions, self._attention, step.regimes, None if received is None else received.states
        )
        if self._is_last:
            return steps.finish(plan, step, states, num_drafts)
        rows = steps.rows
        rows.num_computed[step.rows] += step.counts
        rows.advance_states(step.rows)
        passed = Passed(states)
        if self._speculates:
            drafts = received.draft_ids if received is not None else self._draft_ids(plan, num_drafts)
            passed = Passed(states, starts, num_drafts if num_drafts.any() else _none(), drafts)
        if self._is_first:
            self._ask(plan, planned, starts, num_drafts)
        return passed

    def _take_drafts(self, plan: StepPlan, planned: NDArray[np.int64], received: Passed) -> NDArray[np.int64]:
        """Brings the rows to where the first stage has them. Returns the number of draft tokens of each speculative
        row."""
        rows = self._steps.rows
        if len(received.starts):
            rows.num_computed[planned] = received.starts
        ends = rows.num_computed[planned] + np.frombuffer(plan.counts, "<i4")
        if not self._is_last:
            rows.num_ids[planned] = np.maximum(rows.num_ids[planned], ends)  # of these ids only the number is known
        num_drafts = received.num_drafts
        if not len(num_drafts):
            return np.zeros(plan.num_speculative, np.int64)
        picked = np.repeat(planned[: plan.num_speculative], num_drafts)
        firsts = np.repeat(ends[: plan.num_speculative] - (np.cumsum(num_drafts) - num_drafts), num_drafts)
        rows.ids[picked, firsts + np.arange(len(picked))] = received.draft_ids
        return num_drafts

    def _draft_ids(self, plan: StepPlan, num_drafts: NDArray[np.int64]) -> NDArray[np.int64]:
        rows = self._steps.rows
        parts = [
            rows.ids[row, rows.num_ids[row] : rows.num_ids[row] + num]
            for row, num in zip(np.frombuffer(plan.rows, "<i4").tolist(), num_drafts.tolist(), strict=False)
        ]
        return np.concatenate(parts).astype(np.int64) if parts else _none()

    def _ask(
        self, plan: StepPlan, planned: NDArray[np.int64], starts: NDArray[np.int64], num_drafts: NDArray[np.int64]
    ) -> None:
        """Notes what the last stage will sample."""
        places = np.flatnonzero(np.frombuffer(plan.sample, np.uint8))
        if not len(places):
            return
        ends = (starts + np.frombuffer(plan.counts, "<i4"))[places]
        self._num_unknown[planned[places]] += 1
        self._unanswered.append(
            _Unanswered(
                plan.step, planned[places], ends, places, num_drafts if num_drafts.any() else _none(),
                planned[: plan.num_speculative], plan.break_even,
            )
        )  # fmt: skip


def received_of(message: Hidden, memory: StageMemory | None) -> Passed | None:
    """The inverse of `Passed.message`; None: the stage before has not run the step."""
    if message.fault is not None:
        return None
    states = None
    if message.width:
        dtype: torch.dtype = getattr(torch, message.dtype)
        data: memoryview | bytearray
        if message.num_tokens:
            assert memory is not None, "the stages share no memory"
            data = memory.slot(message.step, message.num_tokens * message.width * dtype.itemsize)
        else:
            data = bytearray(message.data)  # torch wants memory that may be written
        states = torch.frombuffer(data, dtype=dtype).view(-1, message.width)
    columns = (message.starts, message.num_drafts, message.draft_ids)
    starts, num_drafts, ids = (np.frombuffer(column, "<i4").astype(np.int64) for column in columns)
    return Passed(states, starts, num_drafts, ids)
