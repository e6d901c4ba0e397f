"""One model on one device: loads it, opens its KV cache, and runs plans.

The worker process calls it and does not use torch itself. Order of calls: `load`, `offer`, `open_cache`, then `launch`
and `collect` in turn; plans are answered in the order of their launches. The steps keep the rows (see `rows.py`); all
other state of a request is the core's.
"""

import logging
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch

from ...config.config import EngineConfig
from ...config.machine import cache_folder
from ...errors import StartError
from ...ipc.messages import (
    ExpertsRead,
    GroupShape,
    Hidden,
    LateMasks,
    PassReads,
    PlaceExperts,
    ReadExperts,
    SampledIds,
    StageSeconds,
    StepPlan,
    StepResult,
    Transferred,
    bytes_to_ids,
    ids_to_bytes,
)
from ..attention.cache_groups import FULL
from ..attention.kv_cache import KvCache
from ..checkpoint.spec import read_spec
from ..device.base import Device, choose_device, is_out_of_memory
from ..device.queue import Mark, Queue
from ..device.report import DeviceReport
from ..device.sleep import Parked, storages_of
from ..executors.base import DescribedModel
from ..executors.expert_replicas import ExpertReplicas
from ..extension import load_extension
from ..kv_connector.base import ConnectorFacts, LayerConnector, WorkerConnector
from ..kv_connector.registry import of_domain, worker_connector
from ..parallel.collectives import Group, NoMemoryElsewhere, join
from ..parallel.rank import RankInfo
from ..parallel.ring import Ring, join_stages
from ..parallel.stage_memory import StageMemory
from ..steps.base import Steps
from ..steps.host_steps import HostSteps
from ..steps.sampled import Sampled
from ..steps.stage_steps import Passed, StageSteps, received_of
from .kept_weights import KeptWeights, journal_in
from .kernel_checks import machine_key
from .loading import HostModel, load_model, num_spare_states, offered_pages, pages_needed
from .memory import MemoryPlan
from .served import DTYPES
from .shared_weights import SharedWeights

if TYPE_CHECKING:
    from ..gpu.device_steps import DeviceModel
    from ..steps.encoder_steps import EncoderModel
    from .scripted import ScriptedModel

log = logging.getLogger(__name__)

_ALONE = RankInfo()
_TRANSFER_WAIT_S = 0.001  # between polls of KV transfers under way


@dataclass
class _Transfer:
    """What the connector is told of a pass."""

    is_dropped: bool = False  # it may not have written its KV


class Runner:
    """All calls come from one thread, `load` included."""

    def __init__(
        self,
        *,
        config: EngineConfig,
        model: "HostModel | DeviceModel | EncoderModel | ScriptedModel",
        device: Device,
        group: Group,
        timings: dict[str, float],
        shared: SharedWeights | None = None,
        kept: KeptWeights | None = None,
        rank_info: RankInfo = _ALONE,
    ) -> None:
        self._rank, self._stage = rank_info.rank, rank_info.stage
        self._input = self._output = None
        if isinstance(model, HostModel) and config.stages_by_mail:
            self._input = _memory(config, rank_info.input_fd, model.received_width)
            self._output = _memory(config, rank_info.output_fd, model.sent_width)
        self._stage_steps: StageSteps | None = None  # if there are several
        self.timings = timings  # part of the start → seconds
        segments = [each for each in (shared, kept) if each is not None]
        self.weights_fit = all(each.fits for each in segments)  # False: the segment for weights held something else
        self._kept = kept
        self._config = config
        self._model = model
        self._device = device
        self._group = group
        self._memory = MemoryPlan(
            weights=model.weights,
            workspace=model.workspace,
            graphs=model.graphs,
            groups=model.kv_shape.groups(config.block_size),
            block_size=config.block_size,
            max_model_len=config.max_model_len,
            num_sharers=config.data_parallel_size if shared is not None and shared.fits else 1,
        )
        self._num_pages = 0  # of the cache, once it is open
        self._is_asleep = False
        self._has_run = False  # a plan
        self._cache: KvCache | None = None
        self._steps: Steps | None = None
        self._connector: WorkerConnector | None = None
        self._order: deque[StepResult | None] = deque()  # a dropped plan's result; None: the steps have it
        self._parked = Parked()
        self._is_warm = False
        self._waiting: StepPlan | None = None  # the plan launched last, while it waits for masks
        self._late: dict[int, dict[int, bytes]] = {}  # step → late row → mask; empty: anything
        self._is_faulted = False  # until a plan whose `after_fault` is set
        self._unfaulted_at = 0  # the last step of such a plan
        self._read_number = 0  # of the last `ReadExperts`

    @classmethod
    def load(
        cls,
        config: EngineConfig,
        *,
        rank_info: RankInfo = _ALONE,
        queue: Queue | None = None,
        progress: Callable[[int, int], None] | None = None,
        weights_fd: int = -1,
        keeper: str = "",
        is_checked: bool | None = None,
        broken_kernels: Collection[str] = (),
    ) -> "Runner":
        """Reads the checkpoint, or this rank's part of it. queue: for the Triton kernels; None: a GPU makes its own,
        and a CPU uses its own kernels. progress: called with (bytes read, bytes in all). weights_fd: a memfd for
        the weights that the C kernels pack, or with a keeper for the index of what it keeps; -1: this process keeps
        them. keeper: the address of the process that holds a GPU's weights. is_checked: kernels are tried before they
        serve; None: unless a queue is given. broken_kernels: those that broke the device of an earlier process, so
        that they are not tried. Raises ConfigError, CheckpointError, BrokenDeviceError, and StartError if the ranks do
        not meet, or with `--strict-kernels` if kernels fail."""
        timings = {}
        started = time.perf_counter()
        spec = read_spec(Path(config.model.path))
        size = config.tensor_parallel_size
        device = choose_device(config, rank_info=rank_info)
        ring: Ring | None = None
        if config.pipeline_parallel_size > 1 and not config.stages_by_mail:
            group, ring = join_stages(rank_info, size, config.pipeline_parallel_size, device.torch_device)
        else:
            group = join(rank_info, size, device.torch_device, level=config.cpu_level)
        if size > 1 or ring is not None:
            timings["ranks"] = time.perf_counter() - started
            started = time.perf_counter()
        shared = SharedWeights(weights_fd) if weights_fd >= 0 and not keeper else None
        kept = None
        if keeper and weights_fd >= 0 and device.kept_memory is not None:
            journal = journal_in(cache_folder(), machine_key(device.torch_device, rank_info.rank))
            kept = KeptWeights(weights_fd, keeper, device.kept_memory, trim=device.trim, journal=journal)
        with torch.inference_mode():
            model = load_model(
                config, spec, device, queue or device.queue(), group, progress, shared, kept, rank_info=rank_info,
                is_checked=queue is None if is_checked is None else is_checked, broken_kernels=broken_kernels,
                ring=ring,
            )  # fmt: skip
        timings["weights"] = time.perf_counter() - started
        return cls(
            config=config,
            model=model,
            device=device,
            group=group,
            timings=timings,
            shared=shared,
            kept=kept,
            rank_info=rank_info,
        )

    @property
    def notes(self) -> tuple[str, ...]:
        """Lines for the operator, with the KV cache as it was opened, or as it would be offered."""
        size = self._group.size
        if self._config.pipeline_parallel_size == 1:
            ranks = (f"{size} ranks; each of them:",) if size > 1 else ()
        else:
            ranks = (f"stage {self._stage}{f', each of its {size} ranks' if size > 1 else ''}:",)
        num_pages = self._num_pages or self.offer()
        num_spares = num_spare_states(self._config, self._memory.groups, num_pages)
        return (*ranks, self._model.note, *self._memory.lines(num_pages, num_spares))

    @property
    def failed_kernels(self) -> tuple[str, ...]:
        """Kernels that failed their check, so that slower ones compute."""
        return self._model.failed_kernels

    @property
    def memory(self) -> MemoryPlan:
        """The planned memory, without the KV cache."""
        return self._memory

    @property
    def reads(self) -> PassReads:
        """Bytes of the weights that a step reads."""
        return self._model.reads

    def memory_by_kind(self) -> dict[str, int]:
        """What it holds of the device's memory now, and what the plan keeps free for steps and their graphs."""
        memory = self._memory
        is_parked = self._is_asleep and not self._keeps_weights
        found = {"weights": 0 if is_parked else memory.weights, "workspace": memory.workspace}
        if memory.graphs:
            found["graphs"] = memory.graphs
        num_pages = 0 if self._is_asleep else self._num_pages
        if memory.page_bytes:
            found["kv_cache"] = num_pages * memory.page_bytes
        if num_spares := num_spare_states(self._config, memory.groups, num_pages):
            found["draft_states"] = num_spares * memory.groups.state_pages * memory.page_bytes
        return found

    def device_report(self) -> DeviceReport:
        """What the device says of itself."""
        return self._device.report()

    @property
    def block_bytes(self) -> int:
        """Bytes of one page of KV: of a block, all layers, if the model has one group."""
        return self._memory.page_bytes

    @property
    def groups(self) -> tuple[GroupShape, ...]:
        """The cache groups; empty for a model with one group of full attention, whose blocks are pages."""
        groups = self._memory.groups.groups
        if len(groups) == 1 and groups[0].lifetime == FULL:
            return ()
        return tuple(GroupShape(group.lifetime.kind, group.lifetime.span, group.pages) for group in groups)

    @property
    def keys_by_args(self) -> bool:
        """Only requests with equal arguments for the runner plugin may share cached KV."""
        model = self._model
        return isinstance(model, HostModel) and model.plugin is not None and model.plugin.keys_by_args

    @property
    def num_pending(self) -> int:
        """Plans launched and not collected."""
        return len(self._order)

    @property
    def num_transfers(self) -> int:
        """KV transfers under way, which `take_transferred` will report."""
        return 0 if self._connector is None else self._connector.num_pending

    def offer(self) -> int:
        """The number of pages of KV, at least one: as many as `kv_cache_memory` holds, or as many as `max_num_seqs`
        requests can use and the device's memory allows. Without KV, pages have no bytes and are never short."""
        if self._num_pages:
            return self._num_pages
        if not self._memory.page_bytes:
            return pages_needed(self._config, self._model.kv_shape)
        memory = self._memory
        if self._config.kv_cache_memory is not None:
            num_pages = memory.num_pages(self._config.kv_cache_memory)
        else:
            budget = self._device.cache_memory(
                taken=memory.weights + memory.workspace + memory.graphs,
                found=0 if self._kept is None else self._kept.num_found,
            )
            num_pages = min(memory.num_pages(budget), pages_needed(self._config, self._model.kv_shape))
        return offered_pages(self._config, memory.groups, num_pages)

    def open_cache(self, num_pages: int, rank_bytes: tuple[int, ...] = (), hosts: tuple[str, ...] = ()) -> None:
        """Allocates the KV cache and starts the KV connector and the extension, before the first `launch`. Does nothing
        if it is open, as after a restart of the core. rank_bytes: `block_bytes` of each rank; empty: there is one.
        hosts: as `ConnectorFacts.hosts`. Raises ConfigError."""
        if self._steps is not None:
            assert num_pages == self._num_pages, (num_pages, self._num_pages)
            return
        config, model = self._config, self._model
        cache = KvCache(
            shape=model.kv_shape,
            num_pages=num_pages,
            block_size=config.block_size,
            device=self._device.torch_device,
            head_major=model.head_major,
            num_spares=num_spare_states(config, self._memory.groups, num_pages),
        )
        self._num_pages = num_pages
        self._cache = cache
        if config.kv_connector:
            sizes = rank_bytes or (self.block_bytes,)
            facts = ConnectorFacts.of(config, sizes, self.groups, rank=self._rank, hosts=hosts)
            specs = of_domain(config.kv_connector, self._rank, config.kv_domains)
            self._connector = worker_connector(specs, facts)
            assert self._connector is not None, config.kv_connector
            self._connector.register_kv_caches(cache)
        if not isinstance(model, HostModel):
            self._device.trim()  # loading leaves free blocks, which recorded steps could not use
            self._steps = model.steps(config, cache)
            return
        attention = model.backend.attention(cache)
        if config.extension is not None:
            extension, options = load_extension(config.extension)
            attention = extension.wrap_attention(options, attention, cache)
        self._steps = HostSteps(
            config=config,
            model=model.model,
            cache=cache,
            attention=attention,
            ops=model.backend.ops,
            synchronize=self._device.synchronize,
            domain=model.domain,
            agree=(lambda: None) if model.domain is not None else self._group.agree,
            plugin=model.plugin,
            encoder=model.encoder,
        )
        if config.stages_by_mail:
            self._stage_steps = StageSteps(
                self._steps, cast(DescribedModel, model.model), attention,
                is_first=self._stage == 0, is_last=self._stage == config.pipeline_parallel_size - 1,
                speculates=config.speculative is not None,
            )  # fmt: skip

    def warm_up(self) -> None:
        """Compiles kernels and records steps, so that the first plans need not wait for it. Does nothing the second
        time. Where memory does not suffice for all of it, the rest is left undone."""
        if self._is_warm:
            return
        self._is_warm = True
        try:
            with torch.inference_mode():
                self.timings |= self._opened().warm_up()
        except Exception as error:
            if self._group.size > 1 or not is_out_of_memory(error):  # the other ranks would go on
                raise
            log.warning("no memory to record steps before the start: %s", error)

    def launch(self, plan: StepPlan) -> None:
        """Starts the plan; `collect` gives its result. A plan that does not fit into memory is dropped, and so are the
        plans that the core made before it knew."""
        self._has_run = True
        with torch.inference_mode():
            with self._transferring(plan) as transfer:
                self._late = {step: masks for step, masks in self._late.items() if step >= plan.step}
                self._is_faulted = (self._is_faulted and not plan.after_fault) or not self._has_memory_for(
                    plan, lambda: self._opened().launch(plan)
                )
                transfer.is_dropped = self._is_faulted
                self._order.append(_out_of_memory(plan) if self._is_faulted else None)
            if plan.late_rows and not self._is_faulted:
                self._waiting = plan
                self._sample()

    @contextmanager
    def _transferring(self, plan: StepPlan) -> "Iterator[_Transfer]":
        """Around the pass over a plan, which may not be run at all: what its `kv` asks of the connector."""
        transfer, connector = _Transfer(), self._connector if plan.kv else None
        if connector is None:
            yield transfer
            return
        self._device.synchronize()  # the connector reads blocks that earlier steps write
        connector.bind_connector_metadata(plan.kv)
        connector.start_load_kv()
        num_tiles = len(self._model.kv_shape.layers)
        for tile in range(num_tiles):
            connector.wait_for_layer_load(tile)
        by_layer, queue, marks = self._model.by_layer, self._model.queue, list[Mark]()
        if by_layer is not None and isinstance(connector, LayerConnector) and (stops := connector.layer_stops):
            save = connector.save_kv_layer
            by_layer.listen(stops, save if queue is None else lambda tile: marks.append(queue.mark()))
        yield transfer
        if queue is not None and not transfer.is_dropped:
            for tile, mark in enumerate(marks):
                with queue.beside(mark):  # while the device computes the layers behind it
                    connector.save_kv_layer(tile)
        self._device.synchronize()
        num_told = 0 if by_layer is None else by_layer.end()
        for tile in () if transfer.is_dropped else range(num_told, num_tiles):
            connector.save_kv_layer(tile)
        connector.wait_for_save()

    def tell(self, message: LateMasks) -> None:
        """Some masks of a plan, which may not be launched yet. The plan samples when it has all of them."""
        late = self._late.setdefault(message.step, {})
        late.update(dict.fromkeys(bytes_to_ids(message.free), b""))
        rows = bytes_to_ids(message.rows)
        size = len(message.bits) // len(rows) if rows else 0
        late.update((row, message.bits[i * size : (i + 1) * size]) for i, row in enumerate(rows))
        if self._waiting is not None:
            with torch.inference_mode():
                self._sample()

    @property
    def needs_mail(self) -> bool:
        """The plan launched last waits for `tell`; no other may be launched."""
        return self._waiting is not None

    def _sample(self) -> None:
        """Lets the plan that waits sample, if all its masks are here."""
        plan = self._waiting
        assert plan is not None, "no plan waits for masks"
        late = self._late.get(plan.step, {})
        if not late.keys() >= set(bytes_to_ids(plan.late_rows)):
            return
        self._waiting = None
        masks = {row: mask for row, mask in late.items() if mask}
        if not self._has_memory_for(plan, lambda: self._opened().sample(masks)):
            self._is_faulted = True
            self._order[-1] = _out_of_memory(plan)

    def knows_ids(self, plan: StepPlan) -> bool:
        """Whether the first stage may run a plan: it embeds ids that the last stage sampled in earlier steps."""
        is_refused = self._is_faulted and not plan.after_fault
        return is_refused or self._stages().knows_ids(plan)

    def take_ids(self, message: SampledIds) -> None:
        """What the last stage has sampled, for the first one."""
        self._stages().take_ids(message)
        if message.fault is not None and message.step >= self._unfaulted_at:
            self._is_faulted = True

    def run_stage(self, plan: StepPlan, hidden: Hidden | None) -> Hidden | StepResult:
        """This stage's part of a plan: what the next stage needs, or the result in the last stage. It is a fault if
        there is no memory for the step, here or in an earlier stage, or if the plan was made before the core knew of
        such a step. hidden: from the stage before; None in the first stage. The caller knows the times."""
        self._has_run = True
        with torch.inference_mode(), self._transferring(plan) as transfer:
            found = self._run_stage(plan, None if hidden is None else received_of(hidden, self._input))
            transfer.is_dropped = found is None
        if isinstance(found, Passed):
            return found.message(plan.step, self._output)
        if found is not None:
            return found.result(plan.step, 0.0)
        if self._stage < self._config.pipeline_parallel_size - 1:
            return Hidden(plan.step, fault="out_of_memory")
        return StepResult(plan.step, b"", {}, {}, 0.0, fault="out_of_memory")

    def _run_stage(self, plan: StepPlan, received: Passed | None) -> Passed | Sampled | None:
        """None: a fault."""
        if plan.after_fault:
            self._is_faulted, self._unfaulted_at = False, plan.step
        if self._is_faulted or (received is None and self._stage > 0):
            return None
        found: Passed | Sampled | None = None

        def run() -> None:
            nonlocal found
            found = self._stages().run(plan, received)
            self._group.agree()

        if self._has_memory_for(plan, run):
            return found
        self._is_faulted = True
        return None

    def forget(self) -> None:
        """Discards the launched plans, the transfers under way and experts that were not placed. Rows are forgotten
        when a request takes them."""
        self._is_faulted = False
        self._drop_read()
        with torch.inference_mode():
            if self._waiting is not None:
                self._waiting = None
                self._opened().sample({})
            while self.num_pending:
                self.collect()
            while self.num_transfers:
                if self.take_transferred() is None:
                    time.sleep(_TRANSFER_WAIT_S)

    def _has_memory_for(self, plan: StepPlan, part: Callable[[], None]) -> bool:
        """Runs a part of the plan. False: out of memory, on this rank or on another one of its group. Where ranks
        cannot tell each other, this error ends the worker, because they would no longer do the same."""
        try:
            part()
        except Exception as error:
            # The steps of KV domains may be different, so what one of them drops the others would have to drop as well.
            # Stages that hand tensors from device to device would wait for this one.
            is_apart = self._config.kv_domains > 1 or (
                self._config.pipeline_parallel_size > 1 and not self._config.stages_by_mail
            )
            can_give_up = self._group.can_give_up and not is_apart
            if not is_out_of_memory(error) or not can_give_up:
                raise
            self._group.give_up()
            if not isinstance(error, NoMemoryElsewhere):
                num_tokens = sum(bytes_to_ids(plan.counts))
                log.warning("step %d: no memory for %d tokens; the next steps will be smaller", plan.step, num_tokens)
            return False
        return True

    def is_done(self) -> bool:
        """Whether `collect` has a result and would not have to wait for it."""
        return bool(self._order) and (self._order[0] is not None or self._opened().is_done())

    def collect(self) -> StepResult:
        """The result of the oldest launched plan. Raises IndexError if there is none."""
        dropped = self._order.popleft()
        if dropped is not None:
            return dropped
        with torch.inference_mode():
            return self._opened().collect()

    def sleep(self) -> int:
        """Frees the KV cache and, on a GPU, moves the weights to host memory. No plan may be pending; rows and blocks
        lose their contents. Returns the freed bytes."""
        cache = self._cache
        assert cache is not None and not self._order, "sleep before open_cache, or with plans pending"
        num_bytes = self._num_pages * self._memory.page_bytes
        self._is_asleep = True
        self._drop_read()
        self._opened().forget_addresses()
        cache.drop()
        if not self._keeps_weights:
            num_bytes += self._parked.park(storages_of(self._model, self._device.torch_device, cache.storage))
            num_bytes += self._kept.park() if self._kept is not None else 0
        self._device.trim()
        return num_bytes

    @property
    def _keeps_weights(self) -> bool:
        """`sleep` moves no weights: they are in the host's memory already."""
        return isinstance(self._model, HostModel) and self._device.torch_device.type == "cpu"

    def wake(self) -> bool:
        """Allocates and restores what `sleep` freed. False: there is too little memory, and it is still asleep."""
        assert self._cache is not None, "wake before open_cache"
        try:
            if self._kept is not None:
                self._kept.restore()
            self._parked.restore()
            self._cache.restore()
            self._opened().restore()
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            log.warning("no memory to wake up: %s", error)
            self._device.trim()
            return False
        self._is_asleep = False
        return True

    def use_idle(self) -> bool:
        """Does one piece of work that makes later steps faster. If memory runs out, it is left undone."""
        if self._steps is None:
            return False
        try:
            with torch.inference_mode():
                # The device is measured only in an engine that is used, so that a start takes no longer.
                return self._steps.use_idle() or (self._has_run and self._device.measure())
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            return False

    def take_transferred(self) -> Transferred | None:
        """The KV transfers that ended on this rank since the last call; None if there are none."""
        connector = self._connector
        if connector is None:
            return None
        sent, loaded = connector.get_finished()
        if not sent and not loaded:
            return None
        self._device.synchronize()  # later steps see the loaded blocks
        failed = sorted(connector.get_block_ids_with_load_errors())
        num_blocks, load_ms = connector.take_load_cost()
        return Transferred(
            tuple(sorted(loaded)), ids_to_bytes(failed), tuple(sorted(sent)), num_blocks, load_ms, self._rank
        )

    def take_stage_seconds(self) -> StageSeconds | None:
        """Of this stage's steps that were collected since the last call; None: the device does not wait for other
        stages by itself."""
        return None if self._model.handover is None else self._model.handover.take_seconds()

    def take_expert_load(self) -> dict[int, bytes]:
        """Layer → how many tokens each expert had on this rank since the last call, int64; empty: every rank has all
        experts, or there are none. On a GPU it waits for the steps that have been launched."""
        with torch.inference_mode():
            return {layer: own.take_load().numpy().tobytes() for layer, own in self._model.own_experts.items()}

    @property
    def sent_bytes(self) -> int:
        """That other ranks have read from this one so far, one after the other; 0 on GPUs."""
        return self._group.sent_bytes

    def read_experts(self, message: ReadExperts) -> None:
        """Begins to read, on a thread of its own, what this rank lacks of these experts. What was read before and not
        placed is dropped."""
        self._replicas().read(message.layer, message.slots)
        self._read_number = message.number

    @property
    def experts_read(self) -> ExpertsRead | None:
        """What came of the last `read_experts`. None: it goes on, or there was none, or the experts were placed."""
        replicas = self._model.replicas
        problem = None if replicas is None else replicas.problem
        return None if problem is None else ExpertsRead(self._read_number, problem)

    def place_experts(self, message: PlaceExperts) -> bool:
        """From the next `launch` on the ranks have these experts. All ranks call it between the same plans. False: a
        rank has not read their weights, and nothing changes on any."""
        with torch.inference_mode():
            return self._replicas().place(message.layer, message.slots)

    def _replicas(self) -> ExpertReplicas:
        replicas = self._model.replicas
        assert replicas is not None, "no room for replicas"
        return replicas

    def _drop_read(self) -> None:
        if self._model.replicas is not None:
            self._model.replicas.drop()

    def close(self) -> None:
        """Closes the KV connector and the runner plugin, and ends the thread that reads experts."""
        if self._model.replicas is not None:
            self._model.replicas.close()
        if isinstance(self._model, HostModel) and self._model.plugin is not None:
            self._model.plugin.close()
        if self._connector is not None:
            self._connector.close()
            self._connector = None
        self._device.close()

    def _stages(self) -> StageSteps:
        assert self._stage_steps is not None, "one stage, or a plan before open_cache"
        return self._stage_steps

    def _opened(self) -> Steps:
        assert self._steps is not None, "launch before open_cache"
        return self._steps


def _out_of_memory(plan: StepPlan) -> StepResult:
    return StepResult(plan.step, b"", {}, {}, 0.0, fault="out_of_memory")


def _memory(config: EngineConfig, fd: int, width: int) -> StageMemory | None:
    """Between this worker and that of another stage. Raises StartError."""
    if fd < 0:
        return None
    num_slots = config.pipeline_parallel_size + config.pipeline_depth  # at least as many as plans are in flight
    slot_bytes = config.max_num_batched_tokens * width * DTYPES[config.activations].itemsize
    try:
        return StageMemory(fd, num_slots=num_slots, slot_bytes=slot_bytes)
    except OSError as error:
        raise StartError(f"The stages cannot share memory: {error.strerror}.") from error
