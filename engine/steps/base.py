"""What runs plans: on the host, which knows each token before the next step (`HostSteps`), or on a device that runs a
step ahead of the host (`DeviceSteps`)."""

from collections import deque
from collections.abc import Mapping
from typing import Protocol

import numpy as np
import torch

from ...ipc.messages import StepPlan, StepResult
from ..attention.kv_cache import KvCache


class Steps(Protocol):
    """Plans are answered in the order of their launches."""

    @property
    def num_pending(self) -> int:
        """Plans launched and not collected."""

    def launch(self, plan: StepPlan) -> None:
        """Opens and grows rows, copies blocks, starts the forward pass, and samples. A plan with `late_rows` samples
        when `sample` is called; before that no other plan is launched, and this one is not done."""

    def sample(self, masks: Mapping[int, bytes]) -> None:
        """Samples from the plan launched last, which has `late_rows`. masks: late row → what it may sample, as in
        `StepPlan.masks`; one without a mask may sample anything."""

    def is_done(self) -> bool:
        """Whether `collect` would return at once."""

    def collect(self) -> StepResult:
        """The result of the oldest launched plan. Raises IndexError if there is none."""

    def forget_addresses(self) -> None:
        """Drops everything that holds addresses: weights and cache are about to move."""

    def restore(self) -> None:
        """Allocates what `forget_addresses` freed, once weights and cache are back. Raises torch.OutOfMemoryError."""

    def warm_up(self) -> dict[str, float]:
        """Does before the first plan what would delay the first steps: compiles kernels, and records steps. The ranks
        of a group call it at the same time, and do the same in the same order. Returns the seconds by part."""

    def use_idle(self) -> bool:
        """Does one piece of work that makes later steps faster, if there is any. Returns whether there is more. Called
        when no plan waits."""


class ImmediateSteps:
    """`Steps` whose `launch` returns when the step is done, and puts its result into `_results`."""

    def __init__(self) -> None:
        self._results: deque[StepResult] = deque()

    @property
    def num_pending(self) -> int:
        return len(self._results)

    def is_done(self) -> bool:
        return bool(self._results)

    def sample(self, masks: Mapping[int, bytes]) -> None:
        raise AssertionError("no plan of these steps waits for masks")

    def collect(self) -> StepResult:
        return self._results.popleft()

    def forget_addresses(self) -> None:
        pass

    def restore(self) -> None:
        pass

    def warm_up(self) -> dict[str, float]:
        return {}

    def use_idle(self) -> bool:
        return False


def copy_blocks(plan: StepPlan, cache: KvCache) -> None:
    if plan.copies:
        pairs = torch.from_numpy(np.frombuffer(plan.copies, "<i4").astype(np.int64)).to(cache.device)
        cache.copy(pairs[::2], pairs[1::2])
