"""What runs plans: on the host's word, token by token known to it (`HostSteps`), or on a device that is a step ahead of
the host (`DeviceSteps`)."""

from typing import Protocol

import numpy as np
import torch

from ...ipc.messages import StepPlan, StepResult
from ..attention.kv_cache import KvCache


class Steps(Protocol):
    """Plans are answered in the order in which they were launched."""

    @property
    def num_pending(self) -> int:
        """Plans launched and not collected."""

    def launch(self, plan: StepPlan) -> None:
        """Opens and grows rows, copies blocks, and starts the pass."""

    def is_done(self) -> bool:
        """Whether `collect` would not have to wait."""

    def collect(self) -> StepResult:
        """The result of the oldest plan that was launched. Raises IndexError if there is none."""

    def forget_addresses(self) -> None:
        """The memory of weights and cache goes, and comes back elsewhere."""

    def use_idle(self) -> bool:
        """Does a piece of work that makes later steps faster, if any is left. Returns whether more is. Called when no
        plan waits."""


def copy_blocks(plan: StepPlan, cache: KvCache) -> None:
    """Copies what the plan says."""
    if plan.copies:
        device = cache.pages[0][0].device
        pairs = torch.from_numpy(np.frombuffer(plan.copies, "<i4").astype(np.int64)).to(device)
        cache.copy(pairs[::2], pairs[1::2])
