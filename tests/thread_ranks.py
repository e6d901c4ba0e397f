"""The ranks of a group as threads of this process, on real checkpoints. One of them runs at a time, since Triton's
interpreter is not made for several threads; it hands over where it waits for the others."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import Any, TypeVar

import numpy as np
import pytest
import torch
from order_device import Meeting
from runner_driver import Driver, Request, engine_config
from torch import Tensor

from pagewire.config.config import EngineConfig
from pagewire.engine.device.queue import EagerQueue
from pagewire.engine.parallel.collectives import Alone, Group
from pagewire.engine.parallel.rank import RankInfo
from pagewire.engine.parallel.ring import Transfer
from pagewire.engine.runner import runner
from pagewire.engine.runner.runner import Runner
from pagewire.ipc.messages import StepPlan

T = TypeVar("T")


class ThreadGroup:
    """A rank's side. Sums are added in the order of the ranks, as those of processes are."""

    can_give_up = False
    sent_bytes = 0

    def __init__(self, meeting: Meeting, rank: int, runs: threading.Lock) -> None:
        self.rank, self.size = rank, meeting.size
        self._meeting, self._runs = meeting, runs

    def agree(self) -> None:
        pass

    def give_up(self) -> None:
        raise AssertionError("no step is given up here")

    def all_reduce(self, x: Tensor) -> None:
        first, *others = self._exchange(x)
        x.copy_(first)
        for part in others:
            x.add_(part)

    def all_gather(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        parts = torch.stack(self._exchange(x))
        return parts if out is None else out.copy_(parts.view_as(out))

    def reduce_scatter(self, x: Tensor, out: Tensor) -> None:
        first, *others = (part.view(self.size, *out.shape)[self.rank] for part in self._exchange(x))
        out.copy_(first)
        for part in others:
            out.add_(part)

    def all_to_all(
        self, x: Tensor, counts: Sequence[int], most: int, known: Sequence[int] | None = None
    ) -> tuple[Tensor, list[int]]:
        assert len(x) == sum(counts)
        nums = [each.tolist() for each in self._exchange(torch.tensor(counts))]
        assert known is None or list(known) == [num[self.rank] for num in nums]
        parts = [torch.split(part, num)[self.rank] for part, num in zip(self._exchange(x), nums, strict=True)]
        assert sum(map(len, parts)) <= most
        return torch.cat(parts), [len(part) for part in parts]

    def _exchange(self, x: Tensor) -> list[Tensor]:
        self._runs.release()
        try:
            return self._meeting.exchange(self.rank, x)
        finally:
            self._runs.acquire()


class _Coming:
    def __init__(self, x: Tensor, sent: "SimpleQueue[Tensor]", runs: threading.Lock) -> None:
        self._x, self._sent, self._runs = x, sent, runs

    def wait(self) -> None:
        self._runs.release()
        try:
            came = self._sent.get(timeout=100)
        finally:
            self._runs.acquire()
        assert (came.shape, came.dtype) == (self._x.shape, self._x.dtype), "the stages planned different tensors"
        self._x.copy_(came)


class _Gone:
    def wait(self) -> None:
        pass


class ThreadRing:
    """A rank's side of the stages. A tensor comes as late as it may: when it is waited for."""

    def __init__(self, sends: "SimpleQueue[Tensor]", receives: "SimpleQueue[Tensor]", runs: threading.Lock) -> None:
        self._sends, self._receives, self._runs = sends, receives, runs

    def send(self, x: Tensor) -> Transfer:
        self._sends.put(x.clone())
        return _Gone()

    def receive(self, x: Tensor) -> Transfer:
        return _Coming(x, self._receives, self._runs)


class ThreadStages:
    """The ranks of some stages, by their numbers. Ranks of a stage have a meeting."""

    def __init__(self, num_stages: int, size: int) -> None:
        self.size, self.total = size, num_stages * size
        self.runs = threading.Lock()
        self._meetings = [Meeting(size) for _ in range(num_stages)]
        self._edges: list[SimpleQueue[Tensor]] = [SimpleQueue() for _ in range(self.total)]  # from each rank

    def join(self, info: RankInfo, size: int, num_stages: int, device: torch.device) -> tuple[Group, ThreadRing]:
        """The rank's group and its ring, what `ring.join_stages` makes of processes."""
        group = ThreadGroup(self._meetings[info.stage], info.t, self.runs) if size > 1 else Alone()
        before = self._edges[(info.rank - size) % self.total]
        return group, ThreadRing(self._edges[info.rank], before, self.runs)

    def leave(self) -> None:
        """After an error: the others wait no longer for sums."""
        for meeting in self._meetings:
            meeting.leave()


def of_stages(config: EngineConfig, work: Callable[[Runner], T]) -> list[T]:
    """What each rank's work returns, with a runner for the Triton kernels. All stages work at the same time. config:
    as of GPUs, but on a CPU."""
    size = config.tensor_parallel_size
    stages = ThreadStages(config.pipeline_parallel_size, size)

    def run(rank: int) -> T:
        torch.set_num_threads(1)
        info = RankInfo(rank, tuple(range(stages.total)), stage=rank // size, first=rank - rank % size)
        queue = EagerQueue(torch.device("cpu"))
        try:
            with stages.runs, torch.inference_mode(), np.errstate(all="ignore"):
                return work(Runner.load(config, rank_info=info, queue=queue, is_checked=False))
        except BaseException:
            stages.leave()
            raise

    with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(stages.total) as threads:
        patch.setattr(runner, "join_stages", stages.join)
        return list(threads.map(run, range(stages.total)))


def of_ranks(size: int, work: Callable[[ThreadGroup], T]) -> list[T]:
    """What each rank's work returns. Raises the error of one that fails."""
    meeting, runs = Meeting(size), threading.Lock()

    def run(rank: int) -> T:
        torch.set_num_threads(1)
        try:
            with runs, torch.inference_mode(), np.errstate(all="ignore"):
                return work(ThreadGroup(meeting, rank, runs))
        except BaseException:
            meeting.leave()
            raise

    with ThreadPoolExecutor(size) as threads:
        futures = [threads.submit(run, rank) for rank in range(size)]
        errors = [error for future in futures if (error := future.exception()) is not None]
        for error in errors:
            if "BrokenBarrier" not in type(error).__name__:
                raise error
        return [future.result() for future in futures]


def tokens_of(
    folder: Path,
    requests: Callable[[], list[Request]],
    *,
    size: int = 1,
    in_triton: bool = False,
    between: Callable[[Runner, int], None] | None = None,
    at_end: Callable[[Runner], None] = lambda _: None,
    **flags: Any,
) -> list[list[int]]:
    """The outputs of requests, which all ranks must agree on. between: called with each rank's runner before each plan,
    and the plan's number. at_end: called with each rank's runner. flags: of `serve`."""
    if size > 1:
        flags["tensor_parallel_size"] = size
    config = engine_config(folder, **flags)

    def serve(group: ThreadGroup | None) -> list[list[int]]:
        info = RankInfo() if group is None else RankInfo(group.rank, tuple(range(size)))
        queue = EagerQueue(torch.device("cpu")) if in_triton else None
        loaded = Runner.load(config, rank_info=info, queue=queue, is_checked=False)
        loaded.open_cache(200)
        if between is not None:
            _call_before_launch(loaded, between)
        asked = requests()
        Driver(loaded, 200).run(asked, chunk=23)
        at_end(loaded)
        return [request.output for request in asked]

    if size == 1:
        return serve(None)
    groups: dict[int, ThreadGroup] = {}

    def join(info: RankInfo, *_: object, **__: object) -> ThreadGroup:
        return groups[info.rank]

    def of_rank(group: ThreadGroup) -> list[list[int]]:
        groups[group.rank] = group
        return serve(group)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner, "join", join)
        first, *others = of_ranks(size, of_rank)
    assert all(other == first for other in others), "the ranks sampled other tokens"
    return first


def _call_before_launch(served: Runner, between: Callable[[Runner, int], None]) -> None:
    launch = served.launch

    def launched(plan: StepPlan) -> None:
        between(served, plan.step)
        launch(plan)

    served.launch = launched  # type: ignore[method-assign] # of this one runner
