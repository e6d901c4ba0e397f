"""A worker's rank in its tensor-parallel group. Known before torch is imported."""

from dataclasses import dataclass


@dataclass(frozen=True)
class RankInfo:
    """One rank; by default the only one."""

    rank: int = 0
    ranks_here: tuple[int, ...] = (0,)  # all ranks of this machine, this one included
    rendezvous: str = ""  # if there are several ranks: file:///path, or tcp://host:port of rank 0
    memory_fd: int = -1  # of `shared_memory.make_memory`, if all ranks are on one machine and use the C kernels

    @property
    def local_rank(self) -> int:
        """Index of this rank's device on its machine."""
        return self.ranks_here.index(self.rank)
