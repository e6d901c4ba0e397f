"""Where a worker stands among the ranks of its tensor-parallel group. Known before torch is imported."""

from dataclasses import dataclass


@dataclass(frozen=True)
class RankInfo:
    """One rank. By default it is the only one."""

    rank: int = 0
    ranks_here: tuple[int, ...] = (0,)  # all ranks of this machine, this one among them
    rendezvous: str = ""  # where the ranks meet, if there are several: file:///path, or tcp://host:port of rank 0

    @property
    def local_rank(self) -> int:
        """Which of this machine's devices is its own."""
        return self.ranks_here.index(self.rank)
