"""KV domains with the real core and real runners, whose ranks are threads of this process, and without text."""

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes import all_tokens
from invariants import check
from msgspec import structs
from runner_driver import engine_config
from thread_ranks import ThreadGroup, of_ranks

from pagewire.engine.core.domains import Domains, Plans
from pagewire.engine.core.trace import make_scheduler
from pagewire.engine.device.queue import EagerQueue
from pagewire.engine.parallel.rank import RankInfo
from pagewire.engine.runner import runner
from pagewire.engine.runner.runner import Runner
from pagewire.ipc.messages import Enqueue, Failed, StepResult, TokenBatch, bytes_to_ids

NUM_PAGES = 64


class DomainRanks:
    """Runs waves of requests, each when the one before has ended."""

    def __init__(
        self,
        folder: Path,
        num_domains: int,
        *,
        num_pages: int = NUM_PAGES,
        between: Callable[[Runner, int], None] = lambda *_: None,
        in_triton: bool = False,
        **flags: Any,
    ) -> None:
        """num_pages: of each domain. between: called with each rank's runner before each plan, and the plan's step.
        in_triton: on the GPU's steps, which launch a plan before they give the result of the one before."""
        self._between, self._in_triton = between, in_triton
        self._config = engine_config(
            folder, tensor_parallel_size=num_domains, kv_domains=num_domains, pipeline_depth=2, **flags
        )
        self._num_pages = num_pages
        self.output: dict[int, list[int]] = {}
        self.domain_of: dict[int, set[int]] = {}  # rid → those that computed it
        self.num_idle: Counter[int] = Counter()  # domain → steps in which it had no rows and others had
        self._round: list[Plans] = []
        self._results: list[StepResult] = []

    def serve(self, *waves: Sequence[Enqueue]) -> dict[int, list[int]]:
        """The output of each request."""
        self._waves = list(waves)
        self._groups: dict[int, ThreadGroup] = {}

        def join(info: RankInfo, *_: object, **__: object) -> ThreadGroup:
            return self._groups[info.rank]

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(runner, "join", join)
            of_ranks(self._config.kv_domains, self._run)
        for scheduler in self.core.schedulers:
            assert scheduler.pool.num_free == self._num_pages
        return self.output

    def _run(self, group: ThreadGroup) -> None:
        rank, size = group.rank, group.size
        self._groups[rank] = group
        queue = EagerQueue(torch.device("cpu")) if self._in_triton else None
        info = RankInfo(rank, tuple(range(size)))
        loaded = Runner.load(self._config, rank_info=info, queue=queue, is_checked=False)
        loaded.open_cache(self._num_pages)
        if rank == 0:
            make = partial(make_scheduler, self._config, self._num_pages, None, None, loaded.groups)
            self.core = Domains(make, size)
        while True:
            group.all_gather(torch.zeros(1))  # all ranks have run the plans of the last round
            if rank == 0:
                self._conduct()
            group.all_gather(torch.zeros(1))
            if not self._round:
                return
            plans = [plans[rank] for plans in self._round]
            for plan in plans:
                self.num_idle[rank] += not plan.rows
                self._between(loaded, plan.step)
                loaded.launch(plan)
                if not self._in_triton or plan is plans[-1]:
                    while loaded.num_pending:
                        self._results.append(structs.replace(loaded.collect(), domain=rank))

    def _conduct(self) -> None:
        """Applies the results of a round and makes the plans of the next one."""
        core = self.core
        for result in sorted(self._results, key=lambda result: (-result.domain, result.step)):
            core.apply(result)
        self._results.clear()
        for scheduler in core.schedulers:
            check(scheduler)
        for item in core.take_outputs():
            assert not isinstance(item, Failed), item
            for tokens in all_tokens(item) if isinstance(item, TokenBatch) else ():
                self.output.setdefault(tokens.rid, []).extend(bytes_to_ids(tokens.ids))
        if not core.requests and self._waves:
            for asked in self._waves.pop(0):
                core.add(asked)
        self._round = []
        while (plans := core.plan()) is not None:
            self._round.append(plans)
            for domain, scheduler in enumerate(core.schedulers):
                for request in scheduler.table.running:
                    self.domain_of.setdefault(request.rid, set()).add(domain)
