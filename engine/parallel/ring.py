"""How the stages of a pipeline hand tensors from device to device: each sends to the stage after it, and the last one
to the first. Rank t of a stage exchanges with rank t of the others.

Each direction between two ranks is a process group of its own. So what a rank sends never waits behind what it is
sent, and two stages, which exchange in both directions, need no order between the directions.
"""

from typing import Protocol

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from ...errors import StartError
from .collectives import Alone, GlooGroup, Group, NcclGroup, join_world, new_group
from .rank import RankInfo


class Transfer(Protocol):
    """A tensor on its way, as `torch.distributed.Work`."""

    def wait(self) -> object:
        """On a GPU, later work of the current stream comes after the transfer; on a CPU it has ended."""


class Ring(Protocol):
    """This rank's side. Tensors arrive in the order in which they were sent. They are contiguous, and both sides give
    the same shape and type. A tensor is left alone until its transfer has ended, and what is sent until then as well.
    On a GPU a transfer comes after the work of the stream in which it is started."""

    def send(self, x: Tensor) -> Transfer: ...

    def receive(self, x: Tensor) -> Transfer: ...


class ProcessRing:
    """Ranks that are processes, with NCCL on GPUs, which has not been tested on any, and else with gloo."""

    def __init__(self, *, after: int, before: int, sends: ProcessGroup, receives: ProcessGroup) -> None:
        """after, before: the ranks that it sends to and receives from."""
        self._after, self._before, self._sends, self._receives = after, before, sends, receives

    def send(self, x: Tensor) -> Transfer:
        return _begun(torch.distributed.isend(x, self._after, self._sends))

    def receive(self, x: Tensor) -> Transfer:
        return _begun(torch.distributed.irecv(x, self._before, self._receives))


def _begun(work: torch.distributed.Work | None) -> Transfer:
    assert work is not None, "this rank is not in the group of the edge"
    return work


def join_stages(rank_info: RankInfo, size: int, num_stages: int, device: torch.device) -> tuple[Group, Ring]:
    """Waits for all ranks of all stages. size: ranks of a stage. Returns the group of this rank's stage, and its place
    among the stages. Raises StartError."""
    is_cuda, rank = device.type == "cuda", rank_info.rank
    total = size * num_stages
    join_world("nccl" if is_cuda else "gloo", rank_info.rendezvous, rank, total, device if is_cuda else None)
    stages = [new_group(range(first, first + size)) for first in range(0, total, size)] if size > 1 else []
    edges = [new_group(sorted((each, (each + size) % total))) for each in range(total)]  # all ranks make all groups
    group: Group = Alone()
    if stages:
        own = stages[rank_info.stage]
        group = NcclGroup(rank_info, size, device, own) if is_cuda else GlooGroup(rank_info, size, own)
    after, before = (rank + size) % total, (rank - size) % total
    ring = ProcessRing(after=after, before=before, sends=edges[rank], receives=edges[before])
    _try(ring, rank_info, before, device)
    return group, ring


def _try(ring: Ring, rank_info: RankInfo, before: int, device: torch.device) -> None:
    """Exchanges a number with both neighbours. NCCL makes its connections here, and each waits for the other side, so
    one of two neighbours sends first. Raises StartError."""
    own, other = (torch.tensor([number], dtype=torch.int32, device=device) for number in (rank_info.rank, -1))
    transfers = (ring.send, own), (ring.receive, other)
    try:
        for transfer, x in transfers[:: -1 if rank_info.stage % 2 else 1]:
            transfer(x).wait()
    except RuntimeError as error:
        why = str(error).partition("\n")[0].rstrip(".")
        raise StartError(f"The stages cannot exchange tensors at rank {rank_info.rank}: {why}.") from error
    if (found := other.item()) != before:
        raise StartError(f"The stages cannot exchange tensors: rank {before} sent {found:.0f}.")
