"""How the ranks of a tensor-parallel group exchange tensors. One thread of each rank calls, all in the same order."""

import contextlib
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Protocol

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from ...errors import StartError
from ...kernels.cpu import build, sums
from .rank import RankInfo
from .shared_memory import SharedMemory

_TIMEOUT = timedelta(minutes=10)  # the supervisor notices a dead rank long before
_SUM_KINDS: dict[torch.dtype, sums.Kind] = {torch.float32: "float32", torch.bfloat16: "bfloat16"}
_ONE_SHOT_BYTES = 1 << 20  # largest one-shot sum; above, bandwidth matters more than latency


class NoMemoryElsewhere(MemoryError):
    """Another rank had no memory for its part of the step."""


class Group(Protocol):
    """This rank's side of its group. A rank leaves the group only when its process ends: then the supervisor names the
    rank that failed first, and leaving NCCL would wait for all ranks."""

    rank: int
    size: int
    can_give_up: bool  # a step that one rank has no memory for can be given up by all

    @property
    def sent_bytes(self) -> int:
        """Bytes of this rank that others have read, one after the other; 0 on GPUs."""

    def agree(self) -> None:
        """The last call of a step: after it, the step has succeeded on all ranks. Raises NoMemoryElsewhere; so do the
        other methods, during the step."""

    def give_up(self) -> None:
        """After an error of the step, this rank's or NoMemoryElsewhere: returns when all ranks have given the step up.
        Only if `can_give_up`. Raises RuntimeError if another rank has ended, or does not take part in time."""

    def all_reduce(self, x: Tensor) -> None:
        """Replaces x, which is contiguous, by the sum over the ranks, with the same bits on each rank."""

    def all_gather(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """[size, *x.shape]: the x of all ranks in their order. All are contiguous and of one shape. out: memory for
        it, contiguous and of this size."""

    def reduce_scatter(self, x: Tensor, out: Tensor) -> None:
        """Writes this rank's part of the sum over the ranks to `out`. x: [size, *out.shape], or with the first two
        dimensions as one; both are contiguous."""

    def all_to_all(
        self, x: Tensor, counts: Sequence[int], most: int, known: Sequence[int] | None = None
    ) -> tuple[Tensor, list[int]]:
        """Gives each rank some rows. x: [sum of counts, width], contiguous: for each rank so many rows, in the ranks'
        order; all ranks have the same width and dtype. most: rows that this rank may get. known: how many each rank has
        for this one, if all ranks know what they get. Returns the rows that all ranks have for this one, in the ranks'
        order, and how many each has."""


class Alone:
    """A group of one rank."""

    rank = 0
    size = 1
    can_give_up = True
    sent_bytes = 0

    def agree(self) -> None:
        pass

    def give_up(self) -> None:
        pass

    def all_reduce(self, x: Tensor) -> None:
        pass

    def all_gather(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        return x[None] if out is None else out.copy_(x.view_as(out))

    def reduce_scatter(self, x: Tensor, out: Tensor) -> None:
        out.copy_(x.view_as(out))

    def all_to_all(
        self, x: Tensor, counts: Sequence[int], most: int, known: Sequence[int] | None = None
    ) -> tuple[Tensor, list[int]]:
        return x, list(counts)


class SharedMemoryGroup:
    """Processes of one machine that compute on CPUs with the C kernels. Sums are added in float32 in the order of the
    ranks, and rounded once if they are bfloat16."""

    can_give_up = True

    def __init__(self, memory: SharedMemory, exchange: sums.Exchange, rank: int, size: int) -> None:
        """memory: where all ranks have met."""
        self.rank, self.size = rank, size
        self._memory, self._exchange = memory, exchange
        self._waited = (-1, 0.0)  # the round that this rank waits in, and since when
        self._failure: Exception | None = None  # why this rank waits no longer
        self._own = torch.zeros(1)  # which `agree` sums
        self.sum_in_c = exchange.in_c(self._gives_up)

    def all_reduce(self, x: Tensor) -> None:
        self._run(x, x, 0, _SUM_KINDS[x.dtype])

    def all_gather(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        out = x.new_empty((self.size, *x.shape)) if out is None else out
        self._run(x, out, x.nbytes, "copy")
        return out

    def reduce_scatter(self, x: Tensor, out: Tensor) -> None:
        _keep_of_sum(self, x, out)

    def all_to_all(
        self, x: Tensor, counts: Sequence[int], most: int, known: Sequence[int] | None = None
    ) -> tuple[Tensor, list[int]]:
        assert x.is_contiguous() and len(x) == sum(counts), (x.shape, counts)
        out, row = x.new_empty((most, x.shape[1])), x.shape[1] * x.itemsize
        sent = [num * row for num in counts]
        got = self._exchange.all_to_all(self.sum_in_c, x.data_ptr(), sent, out.data_ptr(), out.nbytes)
        self.check()
        assert got is not None, "gave up without a reason"
        return out[: sum(got) // row], [num // row for num in got]

    @property
    def sent_bytes(self) -> int:
        return self._exchange.sent_bytes

    def agree(self) -> None:
        self.all_reduce(self._own)

    def give_up(self) -> None:
        self._exchange.leave()
        self._failure = None
        for is_last in (False, True):  # no rank begins a round before all have come back
            self._waited = -1, time.monotonic()
            if not self._memory.pass_gate(self._is_lost):
                self.check()
            if not is_last:
                self._exchange.come_back()

    def _run(self, x: Tensor, out: Tensor, stride: int, kind: sums.Kind) -> None:
        """Raises RuntimeError if another rank has ended, or does not take part in time, and NoMemoryElsewhere."""
        assert x.is_contiguous(), x.stride()
        at, to = x.data_ptr(), out.data_ptr()
        for start in range(0, x.nbytes, sums.SLOT_BYTES):
            num_bytes = min(sums.SLOT_BYTES, x.nbytes - start)
            is_done = self._exchange.round(at + start, to + start, num_bytes, stride, kind, is_begun=False)
            while not is_done:
                self._gives_up()
                self.check()
                is_done = self._exchange.round(at + start, to + start, num_bytes, stride, kind, is_begun=True)

    def check(self) -> None:
        """After a call of the C program with `sum_in_c`. Raises RuntimeError as `all_reduce` does."""
        if self._failure is not None:
            raise self._failure

    def _gives_up(self) -> bool:
        """Whether to wait no longer for the others; called about once a second, and when one of them has left."""
        number = self._exchange.number
        if number != self._waited[0]:
            self._waited = number, time.monotonic()
        if self._exchange.others_left:
            self._failure = NoMemoryElsewhere("another rank has no memory for this step")
        return self._failure is not None or self._is_lost()

    def _is_lost(self) -> bool:
        """Whether another rank will not come any more."""
        if (ended := self._memory.ended()) is not None:
            self._failure = RuntimeError(f"rank {ended} has ended")
        elif time.monotonic() - self._waited[1] > _TIMEOUT.total_seconds():
            self._failure = RuntimeError(f"another rank has not taken part in a sum within {_TIMEOUT}")
        return self._failure is not None


class GlooGroup:
    """Processes that compute on CPUs. The sum of an element does not depend on the batch: gloo's own all-reduce assigns
    elements to ranks by position and adds in a different order for each."""

    can_give_up = False

    def agree(self) -> None:
        pass

    def give_up(self) -> None:
        raise AssertionError("ranks that share no memory cannot give a step up")

    def __init__(self, rank_info: RankInfo, size: int, own: ProcessGroup | None = None) -> None:
        """own: the group of these ranks among more, which have met; None: there are no others. Waits for all ranks.
        Raises StartError."""
        self.rank, self.size, self._own, self.sent_bytes = rank_info.t, size, own, 0
        if own is None:
            join_world("gloo", rank_info.rendezvous, rank_info.t, size, None)

    def all_reduce(self, x: Tensor) -> None:
        first, *others = self.all_gather(x)
        x.copy_(first)
        for part in others:
            x.add_(part)

    def all_gather(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        self.sent_bytes += x.nbytes * (self.size - 1)
        out = x.new_empty((self.size, *x.shape)) if out is None else out
        torch.distributed.all_gather(list(out.view(self.size, *x.shape).unbind()), x, group=self._own)
        return out

    def reduce_scatter(self, x: Tensor, out: Tensor) -> None:
        _keep_of_sum(self, x, out)

    def all_to_all(
        self, x: Tensor, counts: Sequence[int], most: int, known: Sequence[int] | None = None
    ) -> tuple[Tensor, list[int]]:
        self.sent_bytes += (len(x) - counts[self.rank]) * x.shape[1] * x.itemsize
        return _all_to_all(x, counts, known, self._own)


class NcclGroup:
    """Processes with a CUDA device each. Neither NCCL nor the one-shot sum has been tested on a GPU so far."""

    can_give_up = False
    sent_bytes = 0  # recorded steps would not count

    def agree(self) -> None:
        pass

    def give_up(self) -> None:
        raise AssertionError("ranks on GPUs cannot give a step up")

    def __init__(self, rank_info: RankInfo, size: int, device: torch.device, own: ProcessGroup | None = None) -> None:
        """own: as of `GlooGroup`. Waits for all ranks. Raises StartError."""
        self.rank, self.size, self._own = rank_info.t, size, own
        if own is None:
            join_world("nccl", rank_info.rendezvous, rank_info.t, size, device)
        self._one_shot = OneShot(device, own) if OneShot.is_possible(rank_info, size) else None

    def all_reduce(self, x: Tensor) -> None:
        if self._one_shot is not None and OneShot.can_sum(x):
            self._one_shot.all_reduce(x)
        else:
            torch.distributed.all_reduce(x, group=self._own)

    def all_gather(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        out = x.new_empty((self.size, *x.shape)) if out is None else out
        torch.distributed.all_gather_into_tensor(out, x, group=self._own)
        return out

    def reduce_scatter(self, x: Tensor, out: Tensor) -> None:
        torch.distributed.reduce_scatter_tensor(out, x, group=self._own)

    def all_to_all(
        self, x: Tensor, counts: Sequence[int], most: int, known: Sequence[int] | None = None
    ) -> tuple[Tensor, list[int]]:
        return _all_to_all(x, counts, known, self._own)


class OneShot:
    """Small sums over memory that all devices of a machine map: each rank reads the other ranks' values and adds them
    in rank order, in one kernel and without NCCL's steps (pytorch.org/docs, "PyTorch Symmetric Memory"). It has never
    run: there was no machine with two GPUs."""

    def __init__(self, device: torch.device, own: ProcessGroup | None = None) -> None:
        """own: None stands for all ranks that have met. Collective: all ranks of the group call it at once."""
        import torch.distributed._symmetric_memory as symmetric_memory

        group = own or torch.distributed.group.WORLD
        assert group is not None, "OneShot before join_world"
        self._name = group.group_name
        self._shared = symmetric_memory.empty(_ONE_SHOT_BYTES, dtype=torch.uint8, device=device)
        symmetric_memory.rendezvous(self._shared, self._name)

    @staticmethod
    def is_possible(rank_info: RankInfo, size: int) -> bool:
        """The same answer on every rank: all are on one machine, and each device can read the memory of every other."""
        own, here = range(rank_info.first, rank_info.first + size), rank_info.ranks_here
        if not set(own) <= set(here) or not hasattr(torch.ops.symm_mem, "one_shot_all_reduce_out"):
            return False
        devices = [here.index(rank) for rank in own]
        return all(torch.cuda.can_device_access_peer(a, b) for a in devices for b in devices if a != b)

    @staticmethod
    def can_sum(x: Tensor) -> bool:
        """torch's kernel has no float16."""
        return x.dtype in (torch.float32, torch.bfloat16) and x.nbytes <= _ONE_SHOT_BYTES and x.nbytes % 16 == 0

    def all_reduce(self, x: Tensor) -> None:
        """x: one that `can_sum` admits."""
        mine = self._shared[: x.nbytes].view(x.dtype).view_as(x)
        mine.copy_(x)
        torch.ops.symm_mem.one_shot_all_reduce_out(mine, "sum", self._name, x)


def join(rank_info: RankInfo, size: int, device: torch.device, *, level: str | None = None) -> Group:
    """Waits for all ranks and returns this rank's group. level: of the C kernels, which add on a CPU; None: the best
    that works here. Raises StartError."""
    if size == 1:
        return Alone()
    if device.type == "cuda":
        return NcclGroup(rank_info, size, device)
    return _share_memory(rank_info, size, level) or GlooGroup(rank_info, size)


def _share_memory(rank_info: RankInfo, size: int, level: str | None) -> SharedMemoryGroup | None:
    """None, on all ranks alike, if they share no memory or one of them cannot load the C kernels. Raises StartError."""
    if rank_info.memory_fd < 0:
        return None
    try:
        memory = SharedMemory(rank_info.memory_fd, rank=rank_info.t, size=size, num_bytes=sums.memory_bytes(size))
    except OSError as error:
        raise StartError(f"The {size} ranks cannot share memory: {error.strerror}.") from error
    exchange = None
    with contextlib.suppress(build.BuildError):  # the runner reports why there are no C kernels
        library = build.find(level).load()
        exchange = sums.Exchange(library, memory.address, rank=rank_info.t, size=size)
    can_all = memory.meet(is_able=exchange is not None, timeout_s=_TIMEOUT.total_seconds())
    return SharedMemoryGroup(memory, exchange, rank_info.t, size) if can_all and exchange is not None else None


def join_world(backend: str, rendezvous: str, rank: int, size: int, device: torch.device | None) -> None:
    """Waits for all ranks that will ever exchange tensors; a process does so once. device: of NCCL. Raises
    StartError."""
    try:
        torch.distributed.init_process_group(
            backend,
            init_method=rendezvous,
            rank=rank,
            world_size=size,
            timeout=_TIMEOUT,
            device_id=device,
        )
    except (RuntimeError, ValueError) as error:
        why = str(error).partition("\n")[0].rstrip(".")
        raise StartError(f"The {size} ranks did not meet at {rendezvous}: {why}.") from error


def new_group(ranks: Sequence[int]) -> ProcessGroup:
    """Some of the ranks that have met. All of them call it for all groups, in the same order. Raises StartError."""
    try:
        group: ProcessGroup = torch.distributed.new_group(list(ranks), timeout=_TIMEOUT)
    except (RuntimeError, ValueError) as error:
        why = str(error).partition("\n")[0].rstrip(".")
        raise StartError(f"The ranks {', '.join(map(str, ranks))} did not meet: {why}.") from error
    return group


def _keep_of_sum(group: Group, x: Tensor, out: Tensor) -> None:
    """`Group.reduce_scatter`, of ranks that add everything."""
    whole = x.clone()
    group.all_reduce(whole)
    out.copy_(whole.view(group.size, *out.shape)[group.rank])


def _all_to_all(
    x: Tensor, counts: Sequence[int], known: Sequence[int] | None, own: ProcessGroup | None
) -> tuple[Tensor, list[int]]:
    """The numbers of rows go first, since memory is needed for them."""
    nums = list(known) if known is not None else []
    if known is None:
        sent = torch.tensor(counts, device=x.device)
        got = torch.empty_like(sent)
        torch.distributed.all_to_all_single(got, sent, group=own)
        nums = got.tolist()
    out = x.new_empty((sum(nums), x.shape[1]))
    torch.distributed.all_to_all_single(out, x, nums, list(counts), group=own)
    return out, nums
