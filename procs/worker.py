"""The worker process: the only one that uses a device.

A plain loop instead of an event loop, because it waits for a device and not for sockets: take the next plan, launch it,
send the results of those that are done. On a CPU a step is done when `launch` returns. A GPU computes while the next
plan is taken, and the loop polls both: no system call wakes a thread as fast.
"""

import os
import time
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, assert_never

from msgspec import structs

from ..config.config import EngineConfig
from ..config.cpus import show_cpus
from ..engine.parallel.rank import RankInfo
from ..engine.parallel.stage import StageQueue, StageTimes, Task
from ..errors import StartError
from ..ipc.actor import Post
from ..ipc.channel import Inbox
from ..ipc.messages import (
    CacheOffer,
    ExpertLoad,
    ExpertsRead,
    Facts,
    Hidden,
    LateMasks,
    Leave,
    OpenCache,
    Ping,
    PlaceExperts,
    ReadExperts,
    Reset,
    SampledIds,
    Settings,
    Sleep,
    Slept,
    StepPlan,
    Stop,
    ToWorker,
    Wake,
    WorkerUsage,
)
from .log_lines import set_log_level
from .process_usage import available_bytes, process_usage
from .topology import next_stage, workers

if TYPE_CHECKING:
    from ..engine.runner.runner import Runner

_ALONE = RankInfo()
_IDLE_WAIT_S = 1.0
_TRANSFER_WAIT_S = 0.001  # between polls of KV transfers
_USAGE_S = 0.9  # between reports of what the rank takes; pings come twice a second, and stages report each time
_LOAD_STEPS = 1000  # between reports of the experts' load


class Worker:
    """One rank. Every rank gets the same plans and computes its part; the first one of the last stage sends the
    results. With KV domains each rank gets plans of its own, for the same steps as the others, and sends their results.
    The stages of a pipeline compute the layers one after the other (`engine/steps/stage_steps.py`)."""

    def __init__(
        self,
        config: EngineConfig,
        *,
        rank_info: RankInfo = _ALONE,
        weights_fd: int = -1,
        keeper: str = "",
        progress: Callable[[int, int], None] | None = None,
        broken_kernels: Collection[str] = (),
    ) -> None:
        """`weights_fd`: a memfd for its packed weights, or for their index; -1: none. `keeper`: the address of the
        process that keeps them; empty: none. `progress` is called with the bytes of weights read so far and in all.
        `broken_kernels`: GPU kernels that broke the device of an earlier process; torch replaces them."""
        self._config = config
        self._rank_info = rank_info
        self._weights_fd = weights_fd
        self._keeper = keeper
        self._progress = progress
        self._broken_kernels = broken_kernels
        self._runner: Runner | None = None
        self._num_answered = 0
        num_stages = config.pipeline_parallel_size
        self._answers = rank_info.t == 0 and rank_info.stage == num_stages - 1
        self._next = next_stage(workers(config.num_ranks)[rank_info.rank], config.num_ranks, num_stages)
        self._times = StageTimes()
        # Devices wait for each other by themselves.
        is_first = rank_info.stage == 0 or not config.stages_by_mail
        self._queue = StageQueue(is_first=is_first, knows_ids=self._knows_ids)
        self._reported_at = -_USAGE_S  # when it last said what it takes (monotonic s)
        self._told_read: ExpertsRead | None = None  # what it last said of `ReadExperts`
        self._num_reported = 0  # of these plans, those whose experts' load was reported
        self._num_seen = 0  # of these plans, those at the last `rest`
        self._sent_bytes = 0  # of the reports

    def start(self, post: Post) -> None:
        """Loads the model and offers the core the KV blocks that fit into the remaining memory. Raises a
        PagewireError."""
        started = time.perf_counter()
        if self._config.cpu_sets:
            _bind(self._rank_info.rank, self._config.cpu_sets)
        import torch  # no other process imports it

        self._timings = {f"torch {torch.__version__}": time.perf_counter() - started}
        from ..engine.runner.runner import Runner

        self._post = post
        self._runner = Runner.load(
            self._config, rank_info=self._rank_info, progress=self._progress, weights_fd=self._weights_fd,
            keeper=self._keeper, broken_kernels=self._broken_kernels,
        )  # fmt: skip
        self._offer()

    def _offer(self) -> None:
        runner = self._started()
        num_pages, page_bytes = runner.offer(), runner.block_bytes
        offer = CacheOffer(
            self._rank_info.rank, num_pages, page_bytes, page_bytes, num_pages, runner.groups, runner.failed_kernels,
            runner.keys_by_args, runner.reads,
        )  # fmt: skip
        self._post("core", offer)

    def reset(self) -> None:
        """After the core's death: forgets its rows and KV, wakes up, and offers the cache to the new core. Raises
        StartError."""
        self._queue.clear()
        self._started().forget()
        if not self._started().wake():
            raise StartError("There is too little free memory to wake up for a new core.")
        self._offer()

    def open(self, message: OpenCache) -> Facts:
        """Allocates the KV cache, and makes the first steps as fast as later ones. Raises ConfigError."""
        runner = self._started()
        runner.open_cache(message.num_blocks, message.rank_bytes, message.hosts)
        runner.warm_up()
        notes = runner.notes if self._rank_info.t == 0 else ()  # the others of its stage would say the same
        return Facts(self._timings | runner.timings, notes, runner.weights_fit)

    @property
    def num_answered(self) -> int:
        """Plans computed so far."""
        return self._num_answered

    @property
    def num_pending(self) -> int:
        """Plans taken and not answered."""
        return self._started().num_pending + self._queue.num_plans

    @property
    def num_computing(self) -> int:
        """Plans that the device computes, without one that waits for mail. Call `answer` while there are any."""
        runner = self._started()
        return runner.num_pending - runner.needs_mail

    def take(self, message: Task | Hidden | SampledIds | LateMasks) -> None:
        """Does what is asked for, in the order of the messages and as soon as it can be done."""
        runner = self._started()
        match message:
            case SampledIds():
                runner.take_ids(message)
            case LateMasks():
                runner.tell(message)
                self.answer()
            case _:
                self._queue.put(message)
        while not runner.needs_mail and (due := self._queue.next()) is not None:
            match due.task:
                case StepPlan() as plan if not self._config.stages_by_mail:
                    runner.launch(plan)
                    self.answer()
                case StepPlan() as plan:
                    self._run_stage(plan, due.hidden)
                case Sleep():
                    self._sleep()
                case Wake():
                    self._wake()
                case ReadExperts() as wanted:
                    runner.read_experts(wanted)
                case PlaceExperts() as placement:
                    self.answer(wait=True)  # steps in flight end with the experts that they began with
                    runner.place_experts(placement)
        if self._queue.is_waiting:
            self._times.waits()

    def _knows_ids(self, plan: StepPlan) -> bool:
        return not self._config.stages_by_mail or self._started().knows_ids(plan)

    def _run_stage(self, plan: StepPlan, hidden: Hidden | None) -> None:
        """Runs this stage's part of a plan, and sends on what comes of it."""
        self._times.begins(is_first=hidden is None)
        started = time.perf_counter()
        found = self._started().run_stage(plan, hidden)
        self._answered_one()
        self._times.ends()
        before_ms = 0.0 if hidden is None else hidden.device_ms
        device_ms = max(before_ms, (time.perf_counter() - started) * 1000)
        if isinstance(found, Hidden):
            self._post(self._next, structs.replace(found, device_ms=device_ms))
            return
        if 1 in plan.sample or found.fault is not None:
            self._post(self._next, SampledIds(plan.step, found.ids, found.num_sampled, found.fault))
        if self._rank_info.t == 0:
            self._post("core", structs.replace(found, device_ms=device_ms))

    def _answered_one(self) -> None:
        self._num_answered += 1
        if self._num_answered % _LOAD_STEPS == 0:
            self._report_load()

    def answer(self, *, wait: bool = False) -> None:
        """Sends the core, on the first rank of the last stage, the results of steps that are done. `wait`: waits for
        the oldest step, unless it waits for mail."""
        runner = self._started()
        while self.num_computing and (wait or runner.is_done()):
            result = runner.collect()
            wait = False
            if self._config.kv_domains > 1:
                self._post("core", structs.replace(result, domain=self._rank_info.rank))
            elif self._answers:
                self._post("core", result)
            self._answered_one()
        self.poll()

    def rest(self) -> None:
        """Call it now and then: reports what the rank takes of its machine, and what was counted, if no step has run
        since the last call. The ranks' reports are then of the same steps."""
        self._report_usage()
        if self._num_answered == self._num_seen:
            self._report_load()
        self._num_seen = self._num_answered

    def _report_usage(self) -> None:
        """Tells the core what the rank takes of its machine, about once a second, and where a stage spends its time.
        That it has read experts is told at once."""
        now, runner = time.monotonic(), self._started()
        read = runner.experts_read
        is_due = now - self._reported_at >= _USAGE_S or self._config.pipeline_parallel_size > 1
        if not is_due and (read is None or read == self._told_read):
            return
        self._reported_at, self._told_read = now, read
        device = runner.device_report()
        usage = WorkerUsage(
            self._rank_info.rank, process_usage(), runner.memory_by_kind(), device.bandwidth, device.source,
            dict(device.gpu), available_bytes(),
            self._times.take() if self._config.stages_by_mail else runner.take_stage_seconds(), read,
        )  # fmt: skip
        self._post("core", usage)

    def _report_load(self) -> None:
        """Tells the core which experts tokens chose since the last report, if ranks have whole experts."""
        if self._config.enable_expert_parallel and self._num_answered > self._num_reported:
            self._num_reported = self._num_answered
            runner = self._started()
            sent_bytes = runner.sent_bytes
            load = ExpertLoad(
                self._rank_info.rank, self._num_answered, runner.take_expert_load(), sent_bytes - self._sent_bytes
            )
            self._sent_bytes = sent_bytes
            self._post("core", load)

    def _sleep(self) -> None:
        """Gives back what memory can be brought back. Nothing is pending."""
        self._post("core", Slept(True, self._started().sleep(), rank=self._rank_info.rank))

    def _wake(self) -> None:
        """Restores it, or stays asleep if memory does not suffice."""
        is_awake = self._started().wake()
        problem = "" if is_awake else "There is not memory enough to wake up; free some and try again."
        self._post("core", Slept(not is_awake, problem=problem, rank=self._rank_info.rank))

    def use_idle(self) -> bool:
        """Does a piece of work that makes later steps faster. Whether more is left."""
        return self._runner is not None and self._runner.use_idle()

    @property
    def num_transfers(self) -> int:
        """KV transfers under way. Call `poll` while there are any."""
        return self._started().num_transfers

    def poll(self) -> None:
        """Tells the core which KV transfers are over."""
        if (transferred := self._started().take_transferred()) is not None:
            self._post("core", transferred)

    def close(self) -> None:
        """Ends the threads and sockets of the KV connector."""
        if self._runner is not None:
            self._runner.close()

    def _started(self) -> "Runner":
        assert self._runner is not None, "the worker was not started"
        return self._runner


def _bind(rank: int, cpu_sets: tuple[tuple[int, ...], ...]) -> None:
    """Binds this thread, and those that it starts, so before torch is imported. Raises StartError."""
    try:
        os.sched_setaffinity(0, cpu_sets[rank])
    except OSError as error:  # the cpuset was changed since `resolve` looked
        cpus = show_cpus(cpu_sets[rank])
        raise StartError(f"--cpu-bind: rank {rank} cannot be bound to CPUs {cpus}: {error.strerror}.") from error


def run(
    worker: Worker, inbox: Inbox[ToWorker], post: Post, on_ready: Callable[[Facts], None], on_ping: Callable[[], None]
) -> None:
    """Handles messages until `Stop`."""
    worker.start(post)
    has_idle_work = False
    try:
        while True:
            if worker.num_computing or (has_idle_work and not worker.num_pending):
                wait_s = 0.0
            else:
                wait_s = _TRANSFER_WAIT_S if worker.num_transfers else _IDLE_WAIT_S
            has_mail = inbox.wait(wait_s)
            for message in inbox.drain() if has_mail else ():
                if isinstance(message, Stop):
                    return
                if isinstance(message, StepPlan | OpenCache | Sleep | Wake):
                    has_idle_work = not isinstance(message, Sleep)
                _take(worker, message, post, on_ready, on_ping)
            if worker.num_computing:
                worker.answer()
            elif not has_mail and has_idle_work and not worker.num_pending:
                has_idle_work = worker.use_idle()
            elif worker.num_transfers:
                worker.poll()
    finally:
        worker.close()


def _take(
    worker: Worker, message: ToWorker, post: Post, on_ready: Callable[[Facts], None], on_ping: Callable[[], None]
) -> None:
    match message:
        case StepPlan() | LateMasks() | Sleep() | Wake() | ReadExperts() | PlaceExperts() | Hidden() | SampledIds():
            worker.take(message)
        case OpenCache():
            on_ready(worker.open(message))
        case Ping():
            on_ping()
            worker.rest()
        case Reset():
            if "core" in message.lost:
                worker.reset()
        case Settings():
            set_log_level(message.engine.log_level)
        case Leave():
            post("supervisor", message)
        case Stop():
            pass
        case _:
            assert_never(message)
