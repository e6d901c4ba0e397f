"""A worker's rank among those of its engine. Known before torch is imported.

Rank stage · T + t is rank t of the T ranks of its stage, which divide each layer of the stage among them."""

from dataclasses import dataclass


@dataclass(frozen=True)
class RankInfo:
    """One rank; by default the only one."""

    rank: int = 0
    ranks_here: tuple[int, ...] = (0,)  # all ranks of this machine, this one included
    rendezvous: str = ""  # if its stage has several ranks: file:///path, or tcp://host:port of the first one
    memory_fd: int = -1  # of `shared_memory.make_memory`, if all ranks are on one machine and use the C kernels
    stage: int = 0  # of the pipeline
    first: int = 0  # the first rank of its stage
    input_fd: int = -1  # of the memory in which the stage before leaves its results (`stage_memory.py`); -1: none
    output_fd: int = -1  # and of that for the next stage

    @property
    def t(self) -> int:
        """The rank within its stage."""
        return self.rank - self.first

    @property
    def local_rank(self) -> int:
        """Index of this rank's device on its machine."""
        return self.ranks_here.index(self.rank)
