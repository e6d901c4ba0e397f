"""Stages of a model under the virtual clock: each has the KV of its layers, and takes its time.

A plan goes to every stage. The first one computes from ids, each other one from what the stage before it hands on
(`Hidden`). The last one samples, tells the first one (`Sampled`), and answers the core. Every message is late by a
random time, but those of one link arrive in order. What a stage stores is a hash of its input and of what it reads, so
a stage that runs a plan too early, or with other blocks or positions than the others, changes every token after it.

The rules of a stage, which real workers keep as well:

- The first stage runs a plan once it knows all ids of its rows. `Sampled` does not count for a row opened since.
- A later stage runs a plan once it has its `Hidden`, which says where each row begins and how many positions follow.
- A stage without memory for a plan tells the next one, which drops the plan, too, so the last one answers with a fault;
  each of them drops the plans that follow, until the core knows. The stages before compute them in vain. `Sampled`
  tells the first one, or it would wait for ids that never come.
"""

from collections import deque
from collections.abc import Callable, Sequence
from random import Random
from typing import NamedTuple

from fakes import FakeRow, FakeWorker, hidden_of
from msgspec.structs import replace

from pagewire.ipc.messages import StepPlan, StepResult, bytes_to_ids


class Hidden(NamedTuple):
    """From a stage to the next one: a plan as far as it is computed."""

    step: int
    rows: dict[int, tuple[int, list[int]]]  # row → its first position, and the values of the positions from there on
    fault: bool = False


class Drawn(NamedTuple):
    """What a plan sampled of a row."""

    ids: list[int]
    num_computed: int  # positions of the row that count
    draft_tokens: list[int]  # for its next plan


class Sampled(NamedTuple):
    """From the last stage to the first one."""

    step: int
    rows: dict[int, Drawn]
    fault: bool = False


class Stage(FakeWorker):
    """The worker of one stage."""

    def __init__(self, place: int, num_stages: int, speculate: int, **worker: object) -> None:
        super().__init__(**worker)  # type: ignore[arg-type]
        self.is_first, self.is_last = place == 0, place == num_stages - 1
        self.has_next = not self.is_last
        self._speculate_most = speculate
        self._given: dict[int, tuple[int, list[int]]] = {}  # what the stage before has handed on of the plan
        self._drafts: dict[int, list[int]] = {}  # row → draft tokens for its next plan
        self._opened_at: dict[int, int] = {}  # row → step
        self._num_pending: dict[int, int] = {}  # row → plans whose tokens the first stage does not know
        self._told_at = 0  # the last step whose plan says that the core knows of a fault

    def knows(self, plan: StepPlan) -> bool:
        """Whether the first stage knows the ids of all rows of a plan."""
        if self.is_faulted and not plan.after_fault:
            return True  # it drops the plan
        opened = {row.row for row in plan.open}
        return not any(self._num_pending.get(row, 0) for row in bytes_to_ids(plan.rows) if row not in opened)

    def hear(self, sampled: Sampled) -> None:
        """The first stage is told what a plan sampled."""
        if sampled.fault:
            self.is_faulted |= sampled.step >= self._told_at  # a plan that tells of a fault may have no memory itself
            return
        for row, drawn in sampled.rows.items():
            state = self.rows[row]
            if state is not None and self._is_of(row, sampled.step):
                state.ids.extend(drawn.ids)
                state.num_computed = drawn.num_computed
                self._num_pending[row] -= 1
                self._drafts[row] = drawn.draft_tokens

    def _is_of(self, row: int, step: int) -> bool:
        """Whether a row has still the request that it had in this step."""
        return self._opened_at[row] <= step

    def run_stage(self, plan: StepPlan, hidden: Hidden | None) -> tuple[Hidden, Sampled, StepResult]:
        """Runs its part of a step."""
        if plan.after_fault:
            self._told_at = plan.step
        if hidden is not None:
            self._given = hidden.rows
        if self.is_dropped(plan, hidden):
            self.last_step = plan.step
            result = self._drop(plan)
        elif self.is_last:
            sampling = [row for row, samples in zip(bytes_to_ids(plan.rows), plan.sample, strict=True) if samples]
            starts = {row: len(state.ids) for row in sampling if (state := self.rows[row]) is not None}
            starts |= {opened.row: len(opened.ids) // 4 for opened in plan.open}
            result = self.run(plan)
            if result.fault is None:
                return (
                    Hidden(plan.step, {}),
                    Sampled(plan.step, {r: self._drawn(r, starts[r]) for r in sampling}),
                    result,
                )
        else:
            result = self._run_part(plan)
        is_fault = result.fault is not None
        rows = self._handed_on if not is_fault else dict.fromkeys(bytes_to_ids(plan.rows), (0, [0]))
        return Hidden(plan.step, rows, is_fault), Sampled(plan.step, {}, is_fault), result

    def is_dropped(self, plan: StepPlan, hidden: Hidden | None) -> bool:
        """Whether a plan is not run because of an earlier fault, or one of an earlier stage."""
        return (hidden is not None and hidden.fault) or (self.is_faulted and not plan.after_fault)

    def _drawn(self, row: int, start: int) -> Drawn:
        state = self._row(row)
        draft_tokens = (
            [] if self._draft is None or not self._speculate_most else self._draft(state, self._speculate_most)
        )
        self._drafts[row] = list(draft_tokens)
        return Drawn(list(state.ids[start:]), state.num_computed, list(draft_tokens))

    def _run_part(self, plan: StepPlan) -> StepResult:
        """A step of a stage that is not the last."""
        assert self.last_step is None or plan.step == self.last_step + 1, "plans must come in order"
        self.last_step = plan.step
        self.is_faulted = False
        self._change_rows(plan)
        rows, counts = bytes_to_ids(plan.rows), bytes_to_ids(plan.counts)
        if rows and not self._fits(sum(counts) + plan.num_speculative * plan.speculate):
            for row, count in zip(rows, counts, strict=True):
                self._spoil(self._row(row), count)
            return self._drop(plan)
        self._handed_on: dict[int, tuple[int, list[int]]] = {}
        for i, (row, count) in enumerate(zip(rows, counts, strict=True)):
            state = self._row(row)
            if self.is_first:
                draft_tokens = self._drafts.pop(row, [])[: plan.speculate] if i < plan.num_speculative else []
                start, num_ids = state.num_computed, len(state.ids)
                state.ids.extend(draft_tokens)
                self._compute(state, start, start + count + len(draft_tokens))
                del state.ids[num_ids:]
                self._num_pending[row] += plan.sample[i]
            else:
                start, values = self._given[row]
                self._compute(state, start, start + len(values))
            stored = zip(state.stored, state.states[1:], strict=True)
            self._handed_on[row] = start, [hidden_of(self.groups, values, after) for values, after in stored]
        self._keep_states(plan, rows[plan.num_speculative :])
        return StepResult(plan.step, b"", {}, {}, self.device_ms(counts))

    def _change_rows(self, plan: StepPlan) -> None:
        super()._change_rows(plan)
        for opened in plan.open:
            self._opened_at[opened.row] = plan.step
            self._num_pending[opened.row] = 0
            self._drafts[opened.row] = []

    def _inputs(self, state: FakeRow, start: int, end: int) -> Sequence[int]:
        if self.is_first:
            inputs = super()._inputs(state, start, end)
            return [*inputs, *[1] * (end - start - len(inputs))]  # it has not waited for its ids
        given = self._given[next(row for row, own in enumerate(self.rows) if own is state)]
        assert given[0] == start and len(given[1]) == end - start, "two stages compute different positions"
        return given[1]

    def _draft_tokens(self, state: FakeRow, end: int, most: int) -> list[int]:
        row = next(row for row, own in enumerate(self.rows) if own is state)
        return self._drafts[row][: min(most, len(self._given[row][1]) - 1)]


class Pipeline:
    """The stages and the links between them and the core."""

    def __init__(
        self,
        stages: Sequence[Stage],
        *,
        rng: Random,
        later: Callable[[float, Callable[[], None]], None],
        answer: Callable[[StepResult], None],
    ) -> None:
        """`later`: schedules a call, in seconds. `answer`: gives the core a result."""
        self.stages = stages
        self._rng = rng
        self._later = later
        self._answer = answer
        self._speeds = [rng.choice([0.2, 1.0, 1.0, 5.0]) for _ in stages]
        self._links: dict[tuple[str, int], deque[Callable[[], None]]] = {}  # messages under way
        self._plans: list[deque[StepPlan]] = [deque() for _ in stages]
        self._hidden: list[dict[int, Hidden]] = [{} for _ in stages]
        self._is_busy = [False for _ in stages]
        self._longest: dict[int, float] = {}  # step → milliseconds of its slowest stage

    def run(self, plan: StepPlan) -> None:
        """The core sends a plan."""
        for place, plans in enumerate(self._plans):
            self._send("plans", place, lambda plans=plans: plans.append(plan))

    def _send(self, kind: str, place: int, take: Callable[[], None]) -> None:
        """Sends a message to a stage, which takes it in after those of the same link."""
        link = self._links.setdefault((kind, place), deque())
        link.append(take)

        def arrive() -> None:
            link.popleft()()
            self._advance(place)

        self._later(self._rng.choice([0.0, 0.0001, 0.001]) * self._rng.random(), arrive)

    def _advance(self, place: int) -> None:
        """Has a stage begin with its next plan, if it can."""
        stage, plans = self.stages[place], self._plans[place]
        if self._is_busy[place] or not plans:
            return
        plan, hidden = plans[0], None
        if stage.is_first:
            if not stage.knows(plan):
                return
        elif (hidden := self._hidden[place].pop(plan.step, None)) is None:
            return
        plans.popleft()
        self._is_busy[place] = True
        ms = stage.device_ms(bytes_to_ids(plan.counts)) * self._speeds[place] * self._rng.uniform(0.5, 1.5)
        ms /= len(self.stages)
        self._longest[plan.step] = max(ms, self._longest.get(plan.step, 0.0))
        self._later(ms / 1000, lambda: self._end(place, plan, hidden))

    def _end(self, place: int, plan: StepPlan, given: Hidden | None) -> None:
        stage = self.stages[place]
        hidden, sampled, result = stage.run_stage(plan, given)
        self._is_busy[place] = False
        if stage.is_last:
            self._send("sampled", 0, lambda: self.stages[0].hear(sampled))
            result = replace(result, device_ms=self._longest.pop(plan.step))
            self._answer(result)
        else:
            self._send("hidden", place + 1, lambda: self._hidden[place + 1].update({plan.step: hidden}))
        self._advance(place)
