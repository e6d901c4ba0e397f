"""The tokens that a step sampled, and which of them are kept: after a wrong draft token none are."""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from ...ipc.messages import RowLogprobs, StepPlan, StepResult
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

    def result(self, step: int, device_ms: float) -> StepResult:
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
        )


def take_in(
    plan: StepPlan,
    rows: Rows,
    samples: Samples,
    ids: NDArray[np.int64],
    draft_tokens: NDArray[np.int64],
    prompt_logprobs: dict[int, RowLogprobs],
    logprobs: dict[int, RowLogprobs],
) -> Sampled:
    """Updates the rows and their draft levels. ids: [samples]; draft_tokens: number per speculative row."""
    kept = rows.append(samples.rows, samples.ends, ids)
    places = samples.order[kept]
    ids = ids[kept][np.argsort(places, kind="stable")]
    if not draft_tokens.any():
        return Sampled(prompt_logprobs, logprobs, ids)
    nums = np.bincount(places, minlength=len(plan.sample))
    made = np.flatnonzero(draft_tokens)
    good = nums[made] - 1 >= plan.break_even * draft_tokens[made]
    learn(rows, np.frombuffer(plan.rows, "<i4")[made].astype(np.int64), good, plan.break_even)
    return Sampled(prompt_logprobs, logprobs, ids, nums[np.frombuffer(plan.sample, np.bool_)], draft_tokens)
