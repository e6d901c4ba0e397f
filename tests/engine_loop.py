"""A real scheduler with a real runner, in one process and without text."""

from collections import Counter, deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from fakes import all_tokens
from msgspec import structs
from runner_driver import engine_config

from pagewire.engine.core.trace import make_scheduler
from pagewire.engine.device.queue import Queue
from pagewire.engine.extension import load_extension
from pagewire.engine.kv_connector.base import ConnectorFacts
from pagewire.engine.kv_connector.registry import core_connector
from pagewire.engine.runner.runner import Runner
from pagewire.ipc.messages import Enqueue, Failed, Masks, Sampled, StepPlan, TokenBatch, bytes_to_ids

NUM_BLOCKS = 64


class Loop:
    """Runs requests. `serve` may be called several times and keeps the prefix cache."""

    def __init__(
        self,
        folder: Path,
        *,
        queue: Queue | None = None,
        sleeps: Sequence[int] = (),
        num_pages: int = NUM_BLOCKS,
        num_stages: int = 1,
        **flags: Any,
    ) -> None:
        """`sleeps`: steps after which `sleep` is called once nothing is in flight. `num_pages`: of the cache.
        `num_stages`: for which the scheduler plans; one rank computes all of it."""
        config = engine_config(folder, pipeline_depth=2, pipeline_parallel_size=num_stages, **flags)
        alone = structs.replace(config, pipeline_parallel_size=1, pipeline_depth=config.num_in_flight)
        self.runner = Runner.load(alone, queue=queue)
        self.runner.open_cache(num_pages)
        facts = ConnectorFacts.of(config, (self.runner.block_bytes,), self.runner.groups)
        connector = core_connector(config.kv_connector, facts)
        extension = None
        if config.extension is not None:
            kind, options = load_extension(config.extension)
            extension = kind.core(options)
        self.scheduler = make_scheduler(config, num_pages, connector, extension, self.runner.groups)
        self.sleeps = sleeps
        self.sleep: Callable[[], None] = lambda: None
        everything = b"\xff" * (4 * -(-config.model.vocab_size // 32))  # a mask that allows all tokens
        self.mask_of: Callable[[int, int], bytes] = lambda rid, num: everything  # of a request with `num` output tokens
        self.num_late = 0  # late rows
        self._num_output: Counter[int] = Counter()  # of constrained requests

    def serve(self, requests: Sequence[Enqueue]) -> dict[int, list[int] | Failed]:
        """The output of each request, or its failure."""
        scheduler, runner = self.scheduler, self.runner
        output: dict[int, list[int] | Failed] = {}
        plans: deque[StepPlan] = deque()
        for request in requests:
            scheduler.add(request)
            if request.constraint is not None:
                self._allow([request.rid])
        while True:
            if (sampled := scheduler.constraints.take()) is not None:
                rids = self._rids(sampled)
                self._num_output.update(rids)
                self._allow(rids)
            for message in scheduler.take_late_masks():
                runner.tell(message)
            while (plan := scheduler.plan()) is not None:
                plans.append(plan)
                self.num_late += len(plan.late_rows) // 4
                scheduler.is_paused = scheduler.step in self.sleeps
            while plans and not runner.needs_mail:
                runner.launch(plans.popleft())
            if (transferred := runner.take_transferred()) is not None:
                scheduler.transferred(transferred)
            if not runner.num_pending:
                if transferred is not None or runner.num_transfers:
                    continue
                if not scheduler.is_paused:
                    break
                scheduler.empty()
                self.sleep()
                scheduler.is_paused = False
                continue
            assert runner.is_done()
            scheduler.apply(runner.collect())
            for item in scheduler.take_outputs():
                if isinstance(item, Failed):
                    output[item.rid] = item
                for tokens in all_tokens(item) if isinstance(item, TokenBatch) else ():
                    so_far = output.setdefault(tokens.rid, [])
                    assert isinstance(so_far, list), "output after a failure"
                    so_far.extend(bytes_to_ids(tokens.ids))
        assert scheduler.pool.num_free == scheduler.pool.num_pages
        return output

    def _allow(self, rids: Sequence[int]) -> None:
        masks = (self.mask_of(rid, self._num_output[rid]) for rid in rids)
        self.scheduler.allow(Masks(b"".join(rid.to_bytes(8, "little") for rid in rids), b"".join(masks)))

    def _rids(self, sampled: Sampled) -> list[int]:
        ended = set(memoryview(sampled.ended).cast("q"))
        return [rid for rid in memoryview(sampled.rids).cast("q") if rid not in ended]
