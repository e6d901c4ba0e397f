"""The tokens that a step sampled, and which of them are kept: after a wrong draft token none are."""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from ...ipc.messages import RowLogprobs, StepPlan, StepResult
from ..plugin.guard import NOTHING, Report
from .ngram import learn
from .rows import Rows
from .step_inputs import Samples


def _none() -> NDArray[np.int64]:
    return np.zeros(0, np.int64)


@dataclass(frozen=True)
class Sampled:
    """The parts of a `StepResult`."""

    prompt_logprobs: dict[int, RowLogprobs]
    logprobs: dict[int, RowLogprobs] = field(default_factory=dict)
    ids: NDArray[np.int64] = field(default_factory=_none)  # kept ids, row by row in the plan's order
    nums: NDArray[np.int64] = field(default_factory=_none)  # ids per sampling row; empty: one each
    draft_tokens: NDArray[np.int64] = field(default_factory=_none)  # per speculative row
    vectors: dict[int, bytes] = field(default_factory=dict)
    plugin: Report = NOTHING  # of the runner plugin

    def result(self, step: int, device_ms: float, mask_wait_ms: float = 0.0) -> StepResult:
        return StepResult(
            step=step,
            ids=self.ids.astype("<i4").tobytes(),
            logprobs=self.logprobs,
            prompt_logprobs=self.prompt_logprobs,
            device_ms=device_ms,
            num_sampled=self.nums.astype("<i4").tobytes(),
            num_drafts=int(np.count_nonzero(self.draft_tokens)),
            num_draft_tokens=int(self.draft_tokens.sum()),
            vectors=self.vectors,
            mask_wait_ms=mask_wait_ms,
            failed=self.plugin.failed,
            num_failed_calls=self.plugin.num_failed_calls,
            num_slow_calls=self.plugin.num_slow_calls,
        )


def take_in(
    plan: StepPlan,
    samples: Samples,
    ids: NDArray[np.int64],
    kept: NDArray[np.bool_],
    draft_tokens: NDArray[np.int64],
    prompt_logprobs: dict[int, RowLogprobs],
    logprobs: dict[int, RowLogprobs],
    vectors: dict[int, bytes],
) -> Sampled:
    """The parts of a step's result. ids, kept: [samples] what was sampled, and whether it is part of the text;
    draft_tokens: number per speculative row."""
    places = samples.order[kept]
    ids = ids[kept][np.argsort(places, kind="stable")]
    if not draft_tokens.any():
        return Sampled(prompt_logprobs, logprobs, ids, vectors=vectors)
    nums = np.bincount(places, minlength=len(plan.sample))
    nums = nums[np.frombuffer(plan.sample, np.bool_)]
    return Sampled(prompt_logprobs, logprobs, ids, nums, draft_tokens, vectors)


def learn_drafts(
    plan: StepPlan, rows: Rows, samples: Samples, kept: NDArray[np.bool_], draft_tokens: NDArray[np.int64]
) -> None:
    """Adjusts the draft levels of the rows of a step that had draft tokens. Arguments as in `take_in`; samples of rows
    that were opened since are not kept."""
    nums = np.bincount(samples.order[kept], minlength=len(plan.sample))
    made = np.flatnonzero((draft_tokens > 0) & (nums[: len(draft_tokens)] > 0))
    good = nums[made] - 1 >= plan.break_even * draft_tokens[made]
    learn(rows, np.frombuffer(plan.rows, "<i4")[made].astype(np.int64), good, plan.break_even)
