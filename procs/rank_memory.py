"""The memory that the ranks of one machine share: one for the sums of each stage's ranks, and one from each rank to the
rank that continues its work in the next stage.

It is made for one start of all ranks, which inherit it, and the kernel frees it with the last of them.
"""

import os

from ..config.config import EngineConfig
from ..engine.parallel.shared_memory import make_memory


class RankMemory:
    def __init__(self, config: EngineConfig, *, are_alone: bool) -> None:
        """are_alone: no other launch has ranks of this engine; ranks of several launches share no memory."""
        size, num_stages = config.tensor_parallel_size, config.pipeline_parallel_size
        self._size, self._num_ranks = size, config.num_ranks
        can_sum = are_alone and config.kernels == "compiled" and size > 1
        self._of_stages = [make_memory() for _ in range(num_stages)] if can_sum else []
        num_edges = self._num_ranks - size if are_alone and config.stages_by_mail else 0
        self._from_ranks = [make_memory("pagewire-stages") for _ in range(num_edges)]

    def fields(self, rank: int) -> dict[str, int]:
        """The descriptors of a rank, by their fields of `Launch`; -1: there is none."""
        own, before = self._from_ranks[rank : rank + 1], self._from_ranks[rank - self._size :][: rank >= self._size]
        return {
            "memory_fd": self._of_stages[rank // self._size] if self._of_stages else -1,
            "input_fd": before[0] if before else -1,
            "output_fd": own[0] if own else -1,
        }

    def close(self) -> None:
        """The ranks have inherited it."""
        for fd in (*self._of_stages, *self._from_ranks):
            if fd >= 0:
                os.close(fd)
