"""How the ranks of a tensor-parallel group exchange tensors. One thread of each rank calls, all in the same order."""

from datetime import timedelta
from typing import Protocol

import torch
from torch import Tensor

from ...errors import StartError
from .rank import RankInfo

_TIMEOUT = timedelta(minutes=10)  # a rank that died is noticed by the supervisor long before
_ONE_SHOT_BYTES = 1 << 20  # most that is summed in one shot; beyond, the links' bandwidth counts and not the latency


class Group(Protocol):
    """This rank's side of its group. It is left with the end of the process and not before: a rank that fails has ended
    by the time the others miss it, so the supervisor names the right one; and leaving NCCL would wait for all ranks."""

    rank: int
    size: int

    def all_reduce(self, x: Tensor) -> None:
        """Replaces x, which is contiguous, by the sum over the ranks; the same bits on each of them."""

    def all_gather(self, x: Tensor) -> Tensor:
        """[size, *x.shape]: everyone's x, contiguous and of one shape, in the order of the ranks."""


class Alone:
    """The only rank there is."""

    rank = 0
    size = 1

    def all_reduce(self, x: Tensor) -> None:
        pass

    def all_gather(self, x: Tensor) -> Tensor:
        return x[None]


class GlooGroup:
    """Processes that compute on CPUs. What one of them adds up is the same in any batch: gloo's own sum is dealt out to
    the ranks by the position in the tensor, and the order in which it adds is another for each."""

    def __init__(self, place: RankInfo, size: int) -> None:
        """Waits for all ranks. Raises StartError."""
        self.rank, self.size = place.rank, size
        _join("gloo", place, size, None)

    def all_reduce(self, x: Tensor) -> None:
        first, *others = self.all_gather(x)
        x.copy_(first)
        for part in others:
            x.add_(part)

    def all_gather(self, x: Tensor) -> Tensor:
        return _all_gather(x, self.size)


class NcclGroup:
    """Processes with a CUDA device each. Tested on no GPU so far, neither NCCL nor the one-shot sum."""

    def __init__(self, place: RankInfo, size: int, device: torch.device) -> None:
        """Waits for all ranks. Raises StartError."""
        self.rank, self.size = place.rank, size
        _join("nccl", place, size, device)
        self._one_shot = OneShot(device) if OneShot.is_possible(place, size) else None

    def all_reduce(self, x: Tensor) -> None:
        if self._one_shot is not None and x.nbytes <= _ONE_SHOT_BYTES and x.nbytes % 16 == 0:
            self._one_shot.all_reduce(x)
        else:
            torch.distributed.all_reduce(x)

    def all_gather(self, x: Tensor) -> Tensor:
        return _all_gather(x, self.size)


class OneShot:
    """Small sums over memory that all devices of a machine map: each rank reads the others' numbers and adds them up in
    the order of the ranks, in one kernel and without NCCL's steps (pytorch.org/docs, "PyTorch Symmetric Memory").
    Never run so far: there was no machine with two GPUs."""

    def __init__(self, device: torch.device) -> None:
        """All ranks of the group at once."""
        import torch.distributed._symmetric_memory as symmetric_memory

        group = torch.distributed.group.WORLD
        assert group is not None, "the group is joined before"
        self._name = group.group_name
        self._shared = symmetric_memory.empty(_ONE_SHOT_BYTES, dtype=torch.uint8, device=device)
        symmetric_memory.rendezvous(self._shared, self._name)

    @staticmethod
    def is_possible(place: RankInfo, size: int) -> bool:
        """The same answer on every rank: all are on one machine, and each device can read every other one's memory."""
        if len(place.ranks_here) < size or not hasattr(torch.ops.symm_mem, "one_shot_all_reduce_out"):
            return False
        return all(torch.cuda.can_device_access_peer(a, b) for a in range(size) for b in range(size) if a != b)

    def all_reduce(self, x: Tensor) -> None:
        """See `Group`. x: float32 or bfloat16, of at most _ONE_SHOT_BYTES and a multiple of 16 bytes."""
        mine = self._shared[: x.nbytes].view(x.dtype).view_as(x)
        mine.copy_(x)
        torch.ops.symm_mem.one_shot_all_reduce_out(mine, "sum", self._name, x)


def join(place: RankInfo, size: int, device: torch.device) -> Group:
    """This rank's group, once all of its ranks are there. Raises StartError."""
    if size == 1:
        return Alone()
    return NcclGroup(place, size, device) if device.type == "cuda" else GlooGroup(place, size)


def _join(backend: str, place: RankInfo, size: int, device: torch.device | None) -> None:
    try:
        torch.distributed.init_process_group(
            backend,
            init_method=place.rendezvous,
            rank=place.rank,
            world_size=size,
            timeout=_TIMEOUT,
            device_id=device,
        )
    except (RuntimeError, ValueError) as error:
        why = str(error).partition("\n")[0].rstrip(".")
        raise StartError(f"The {size} ranks did not meet at {place.rendezvous}: {why}.") from error


def _all_gather(x: Tensor, size: int) -> Tensor:
    out = x.new_empty((size, *x.shape))
    torch.distributed.all_gather(list(out.unbind()), x)
    return out
