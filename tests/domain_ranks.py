"""KV domains with the real core, real runners and real KV tiers, whose ranks are threads of this process, and without
text."""

from collections import Counter
from collections.abc import Callable, Sequence
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
from pagewire.engine.core.kv_connector import TierConnector
from pagewire.engine.core.trace import make_schedulers
from pagewire.engine.device.queue import EagerQueue
from pagewire.engine.extension import load_extension
from pagewire.engine.kv_connector.base import ConnectorFacts
from pagewire.engine.kv_connector.registry import core_connector, of_domain
from pagewire.engine.parallel.rank import RankInfo
from pagewire.engine.runner import runner
from pagewire.engine.runner.runner import Runner
from pagewire.ipc.messages import Enqueue, Failed, StepResult, TokenBatch, Transferred, bytes_to_ids

NUM_PAGES = 64
_MAX_EMPTY_ROUNDS = 1_000_000  # while KV is loaded


class DomainRanks:
    """Runs waves of requests, each when the one before has ended."""

    def __init__(
        self,
        folder: Path,
        num_domains: int,
        *,
        num_pages: int = NUM_PAGES,
        between: Callable[[Runner, int], None] = lambda *_: None,
        before_wave: Callable[[], None] = lambda: None,
        in_triton: bool = False,
        **flags: Any,
    ) -> None:
        """num_pages: of each domain. between: called with each rank's runner before each plan, and the plan's step.
        before_wave: called before each wave, when nothing is left to be planned. in_triton: on the GPU's steps, which
        launch a plan before they give the result of the one before."""
        self._between, self._before_wave, self._in_triton = between, before_wave, in_triton
        self._config = engine_config(
            folder, tensor_parallel_size=num_domains, kv_domains=num_domains, pipeline_depth=2, **flags
        )
        self._num_pages = num_pages
        self.output: dict[int, list[int]] = {}
        self.domain_of: dict[int, set[int]] = {}  # rid → those that computed it
        self.num_idle: Counter[int] = Counter()  # domain → steps in which it had no rows and others had
        self._round: list[Plans] = []
        self._results: list[StepResult] = []
        self._transfers: list[Transferred] = []
        self._connectors: list[TierConnector] = []
        self._is_over = False
        self._num_empty = 0  # rounds without a plan

    def serve(self, *waves: Sequence[Enqueue]) -> dict[int, list[int]]:
        """The output of each request."""
        self._waves = list(waves)
        self._groups: dict[int, ThreadGroup] = {}

        def join(info: RankInfo, *_: object, **__: object) -> ThreadGroup:
            return self._groups[info.rank]

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(runner, "join", join)
            of_ranks(self._config.kv_domains, self._run)
        for connector in self._connectors:
            connector.close()
        for scheduler in self.core.schedulers:
            assert scheduler.pool.num_free == self._num_pages
        return self.output

    def _run(self, group: ThreadGroup) -> None:
        rank, size = group.rank, group.size
        self._groups[rank] = group
        queue = EagerQueue(torch.device("cpu")) if self._in_triton else None
        info = RankInfo(rank, tuple(range(size)))
        loaded = Runner.load(self._config, rank_info=info, queue=queue, is_checked=False)
        rank_bytes = (loaded.block_bytes,) * size
        loaded.open_cache(self._num_pages, rank_bytes)
        if rank == 0:
            self._open_core(loaded, rank_bytes)
        while True:
            group.all_gather(torch.zeros(1))  # all ranks have run the plans of the last round
            if rank == 0:
                self._conduct()
            group.all_gather(torch.zeros(1))
            if self._is_over:
                loaded.close()
                return
            plans = [plans[rank] for plans in self._round]
            for plan in plans:
                self.num_idle[rank] += not plan.rows
                self._between(loaded, plan.step)
                loaded.launch(plan)
                if not self._in_triton or plan is plans[-1]:
                    while loaded.num_pending:
                        self._results.append(structs.replace(loaded.collect(), domain=rank))
            if (transferred := loaded.take_transferred()) is not None:
                self._transfers.append(transferred)

    def _open_core(self, loaded: Runner, rank_bytes: tuple[int, ...]) -> None:
        config, num = self._config, self._config.kv_domains
        for domain in range(num):
            facts = ConnectorFacts.of(config, rank_bytes, loaded.groups, rank=domain)
            connector = core_connector(of_domain(config.kv_connector, domain, num), facts)
            if connector is not None:
                self._connectors.append(connector)
        extensions = []
        if config.extension is not None:
            kind, options = load_extension(config.extension)
            extensions = [kind.core(options) for _ in range(num)]
        core = make_schedulers(config, self._num_pages, self._connectors, extensions, loaded.groups)
        assert isinstance(core, Domains)
        self.core = core

    def _conduct(self) -> None:
        """Applies the results of a round and makes the plans of the next one."""
        core = self.core
        for result in sorted(self._results, key=lambda result: (-result.domain, result.step)):
            core.apply(result)
        self._results.clear()
        for transferred in self._transfers:
            core.transferred(transferred)
        self._transfers.clear()
        for scheduler in core.schedulers:
            check(scheduler)
        for item in core.take_outputs():
            assert not isinstance(item, Failed), item
            for tokens in all_tokens(item) if isinstance(item, TokenBatch) else ():
                self.output.setdefault(tokens.rid, []).extend(bytes_to_ids(tokens.ids))
        self._plan()
        if not self._round and not core.requests and not core.is_busy and self._waves:
            self._before_wave()
            for asked in self._waves.pop(0):
                core.add(asked)
            self._plan()
        self._is_over = not self._round and not core.requests and not core.is_busy
        self._num_empty = 0 if self._round else self._num_empty + 1
        assert self._num_empty < _MAX_EMPTY_ROUNDS, "nothing is planned, and requests are open"

    def _plan(self) -> None:
        core, self._round = self.core, []
        while (plans := core.plan()) is not None:
            self._round.append(plans)
            for domain, scheduler in enumerate(core.schedulers):
                for request in scheduler.table.running:
                    self.domain_of.setdefault(request.rid, set()).add(domain)
