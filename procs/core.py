"""The core process: the scheduler behind a mailbox. It makes plans; it computes nothing and handles no text."""

import asyncio
import contextlib
import logging
import os
import time
from functools import partial
from itertools import chain
from typing import BinaryIO, assert_never

from msgspec import structs

from ..config.config import EngineConfig
from ..engine.core import trace
from ..engine.core.domains import AnyScheduler
from ..engine.core.expert_loads import ExpertLoads
from ..engine.core.expert_placement import Balancer
from ..engine.core.kv_connector import TierConnector
from ..engine.core.planner import Lateness
from ..engine.extension import load_extension
from ..engine.kv_connector.base import ConnectorFacts
from ..engine.kv_connector.registry import core_connector, of_domain, resize
from ..errors import StartError
from ..ipc.actor import Post
from ..ipc.messages import (
    Accepted,
    CacheOffer,
    Cancel,
    Constrain,
    Constrained,
    Enqueue,
    ExpertLoad,
    Facts,
    Failed,
    GroupShape,
    LateMasks,
    Leave,
    Masks,
    OpenCache,
    Opened,
    Ping,
    PlaceExperts,
    ReadExperts,
    Reset,
    Settings,
    Sleep,
    Slept,
    Snapshot,
    StepPlan,
    StepResult,
    Stop,
    StopHit,
    ToCore,
    Transferred,
    Wake,
    WorkerSnapshot,
    WorkerUsage,
)
from ..ipc.zmq_channel import Keys
from .client_port import CLIENT_RIDS, ClientPort
from .idle_check import IdleCheck
from .kv_events import KvEventPublisher
from .mask_times import LIMIT_S, MaskTimes
from .pipeline_times import PipelineTimes
from .rank_transfers import RankTransfers
from .roof import Roof, share_of_roof
from .sleep import SleepControl
from .step_times import StepTimes
from .topology import workers

log = logging.getLogger("pagewire")

_ASK_AGAIN_S = 0.001  # until a KV connector that has not decided is asked again
_NUM_TAIL_IDS = 64  # of a prompt's end, which say whether it ends within reasoning


class CoreActor:
    """Schedules once every worker has offered its KV blocks; requests that arrive before that wait."""

    def __init__(
        self,
        config: EngineConfig,
        *,
        keys: Keys | None = None,
        epoch: int = 1,
        device_epoch: int = 1,
        settings: Settings | None = None,
        hosts: tuple[str, ...] = (),
    ) -> None:
        """`keys`: of the address where clients connect. `epoch`: in which it starts; the first core's is 1.
        `device_epoch`: in which it and the workers start, with its term. `settings`: that hold instead of `config`, by
        which the workers have reserved memory. `hosts`: of the ranks, as `ConnectorFacts.hosts`."""
        self._config = config
        self._settings = config if settings is None else settings.engine  # as they hold now
        self._settings_number = 0 if settings is None else settings.number
        self._keys = keys
        self._epoch = epoch
        self._device_epoch = device_epoch  # of the workers; with the next one they are replaced
        self._hosts = hosts
        self._clients: ClientPort | None = None
        self._scheduler: AnyScheduler | None = None
        self._connectors: list[TierConnector] = []  # of each domain, if there are any; themselves, also if recorded
        self._trace: BinaryIO | None = None
        self._kv_events: KvEventPublisher | None = None
        self._early: list[Enqueue | Cancel] = []  # messages that came before the workers' offers
        self._unsure: dict[int, Enqueue] = {}  # rid → request that is not added before its grammar is compiled
        self._unsure_since: dict[int, float] = {}  # first rid of such a request → when it arrived (monotonic s)
        self._given_up: set[int] = set()  # rids of them that were cancelled since
        self._workers = workers(config.num_ranks)
        self._offers: dict[int, CacheOffer] = {}  # by rank
        self._transfers = RankTransfers(config.num_ranks // config.kv_domains)
        self._failed_kernels: tuple[str, ...] = ()  # of any rank
        self._expert_loads = ExpertLoads(config.num_ranks, config.pipeline_parallel_size)
        self._balancer = Balancer(config.tensor_parallel_size, config.expert_replicas, config.pipeline_parallel_size)
        self._asks_again = False  # a call of `_advance` is due
        self._was_busy = False  # a sequence ran or waited after the last `_advance`
        self._oldest_plan_at = 0.0  # when the oldest plan in flight became the oldest (monotonic s)
        self._step_times = StepTimes()
        self._roof = Roof()
        self._usages: dict[int, WorkerUsage] = {}  # by rank
        self._mask_times = MaskTimes()
        self._is_watching = False  # a call of `_take_back` is due
        self._pipeline_times = (
            PipelineTimes(config.pipeline_parallel_size) if config.pipeline_parallel_size > 1 else None
        )
        self._idle_check = IdleCheck()

    def start(self, post: Post) -> Facts:
        self._post = post
        self._sleep = SleepControl(
            num_workers=len(self._workers),
            tell_workers=self._tell_workers,
            tell_api=self._tell_sleep,
            record=self._record,
        )
        if self._config.kv_events is not None:
            self._kv_events = KvEventPublisher.of(self._config, self._config.kv_events, self._keys)
        if self._config.client_address is not None:
            self._clients = ClientPort(self._config, self._config.client_address, keys=self._keys)
        return Facts()

    def handle(self, messages: list[ToCore]) -> None:
        started = time.monotonic()
        num_steps = 0
        for message in messages:
            if isinstance(message, StepResult):
                if self._pipeline_times is not None and not self._config.stages_by_mail:
                    # Only the last stage has said how long it took, and the slowest one is the step.
                    device_ms = message.device_ms * self._pipeline_times.slowest()
                    message = structs.replace(message, device_ms=device_ms)
                self._record(message)
                if not message.domain:  # all domains take part in each step
                    self._note_times(message, started)
                    num_steps += 1
                self.scheduler.apply(message)
            elif isinstance(message, ExpertLoad):
                self._expert_loads.take(message)
            elif isinstance(message, Settings):
                self._settle(message)
            elif isinstance(message, WorkerUsage):
                self._take_usage(message)
            else:
                self._take(message)
        if self._scheduler is not None:
            self._advance(self._scheduler)
            if self._pipeline_times is not None:
                is_in_flight = self._scheduler.num_in_flight > 0
                self._pipeline_times.note(time.monotonic(), is_in_flight=is_in_flight)
        if num_steps:
            self._step_times.handled(num_steps, time.monotonic() - started)

    def _take_usage(self, usage: WorkerUsage) -> None:
        self._usages[usage.rank] = usage
        stage, number = divmod(usage.rank, self._config.tensor_parallel_size)
        if self._pipeline_times is not None and usage.stage is not None and number == 0:
            self._pipeline_times.take(stage, usage.stage, time.monotonic())
        if usage.read is not None and (change := self._balancer.hear(usage.rank, usage.read)) is not None:
            log.info("layer %d: the ranks get the experts %s", change.layer, change.slots)
            self._tell_workers(change)

    def _note_times(self, result: StepResult, now: float) -> None:
        """now: when it came (monotonic s)."""
        device_s, mask_wait_s = result.device_ms / 1000, result.mask_wait_ms / 1000
        self._step_times.answered(device_s, now - self._oldest_plan_at, mask_wait_s)
        self._roof.answered(device_s)
        self._mask_times.stepped(device_s)
        self._oldest_plan_at = now

    def _take(self, message: ToCore) -> None:
        match message:
            case Transferred():
                self._transferred(message)
            case CacheOffer():
                self._open(message)
            case Enqueue() | Cancel() if self._scheduler is None:
                self._early.append(message)
            case Enqueue(constraint=None):
                self._add(message, time.monotonic())
            case Enqueue():
                self._constrain(message)
            case Constrained():
                self._begin(message)
            case Masks():
                self._record(message)
                parts = (memoryview(part).cast("q") for part in (message.rids, message.free, message.complete))
                rids = (*chain.from_iterable(parts), *(rid for rid, _, _ in message.failed))
                self._mask_times.came(rids, time.monotonic())
                self.scheduler.allow(message)
            case Cancel():
                self._cancel(message)
            case StopHit():
                self._record(message)
                for rid in message.rids:
                    self.scheduler.stop_hit(rid)
            case Sleep() | Wake() | Slept():
                self._sleep.hear(message)
            case Ping():
                self._report()
            case Reset():
                self._reset(message)
            case StepResult() | ExpertLoad() | WorkerUsage() | Settings() | Leave() | Stop():
                pass
            case _:
                assert_never(message)

    @property
    def step_age_s(self) -> float:
        """Age of the oldest plan in flight (s); 0: none is in flight."""
        is_in_flight = self._scheduler is not None and self._scheduler.num_in_flight > 0
        return time.monotonic() - self._oldest_plan_at if is_in_flight else 0.0

    async def stop(self, grace_s: float) -> None:
        """The api has ended every request before this call."""
        if self._trace is not None:
            self._trace.close()
            self._trace = None
        if self._kv_events is not None:
            self._kv_events.close()
            self._kv_events = None
        if self._clients is not None:
            self._clients.close("The engine is stopping.")
            self._clients = None
        for connector in self._connectors:
            connector.close()
        self._connectors.clear()

    def _add(self, message: Enqueue, arrived: float) -> bool:
        """Adds a request. Returns whether it was accepted."""
        self._record(trace.Arrived(message, arrived))
        replies = self.scheduler.add(message, arrived)
        for reply in replies:
            self._reply(reply)
        return isinstance(replies[0], Accepted)

    def _reply(self, reply: Accepted | Failed) -> None:
        if self._clients is not None and reply.rid >= CLIENT_RIDS:
            self._clients.reply(reply)
        else:
            self._post("api", reply)

    def _constrain(self, message: Enqueue) -> None:
        """Has the grammar of a request compiled before the request is added, so a bad grammar is refused before
        anything is computed."""
        rids = range(message.rid, message.rid + message.n)
        if any(rid in self._unsure for rid in rids):
            refusal: Failed | None = Failed(message.rid, "internal", "Two requests have the same number.")
        elif len(self._unsure) + message.n > self._settings.max_queued_requests and not message.attempt:
            refusal = Failed(message.rid, "queue_full", "Too many grammars wait to be compiled; try again later.")
        else:
            refusal = self.scheduler.refusal(message)
        if refusal is not None:
            for rid in rids:
                self._reply(structs.replace(refusal, rid=rid))
            return
        self._unsure.update(dict.fromkeys(rids, message))
        self._unsure_since[message.rid] = time.monotonic()
        self._ask_grammar(message)

    def _ask_grammar(self, message: Enqueue) -> None:
        assert message.constraint is not None
        tail_ids = b"" if self._config.model.decoder_start_ids else message.prompt_ids[-4 * _NUM_TAIL_IDS :]
        self._post("grammar", Constrain(message.rid, message.n, message.constraint, tail_ids, message.resume_ids))

    def _begin(self, answer: Constrained) -> None:
        """The grammar of a request was compiled, or it cannot be: adds the request or refuses it."""
        message = self._unsure.get(answer.rid)
        if message is None:  # the request was dropped by `_reset`
            return
        rids = range(message.rid, message.rid + message.n)
        arrived = self._unsure_since.pop(message.rid)
        given_up = self._given_up.intersection(rids)
        self._given_up -= given_up
        for rid in rids:
            del self._unsure[rid]
        if answer.kind is not None:
            for rid in rids:
                self._reply(Failed(rid, answer.kind, answer.detail, answer.param))
        elif not self._add(message, arrived):  # its queue timeout counts from its arrival
            for rid in rids:
                self.scheduler.constraints.end(rid)
        else:
            self._mask_times.began(rids, time.monotonic())
            if given_up:
                self._cancel(Cancel(tuple(sorted(given_up))))

    def _transferred(self, message: Transferred) -> None:
        if (whole := self._transfers.add(message)) is not None:
            self._record(whole)
            self.scheduler.transferred(whole)

    def _cancel(self, message: Cancel) -> None:
        for rid in message.rids:
            if (held := self._unsure.get(rid)) is not None:
                self._given_up.add(rid)
                if self._given_up.issuperset(range(held.rid, held.rid + held.n)):
                    self.scheduler.constraints.end(held.rid)  # its grammar need not be compiled any more
        self._record(message)
        for rid in message.rids:
            self.scheduler.cancel(rid)

    def _record(self, event: trace.Event) -> None:
        if self._trace is not None:
            trace.write(self._trace, event)

    @property
    def awaits_ranks(self) -> bool:
        """Some ranks have ended a KV transfer, and others have not."""
        return self._transfers.is_partial

    @property
    def scheduler(self) -> AnyScheduler:
        """The scheduler, once the worker's cache is open."""
        assert self._scheduler is not None, "the worker has not offered its cache"
        return self._scheduler

    def _open(self, offer: CacheOffer) -> None:
        """Makes the scheduler once every rank has made its offer. It gets as many blocks as the smallest offer."""
        config = self._config
        self._offers[offer.rank] = offer
        if not self._has_workers:
            return
        found = (kernel for other in self._offers.values() for kernel in other.failed_kernels)
        self._failed_kernels = tuple(dict.fromkeys(found))
        groups = offer.groups
        if any(other.groups != groups for other in self._offers.values()):
            raise StartError("The workers disagree about the groups of the cache; start all of them with one version.")
        num_pages = min(other.num_pages if groups else other.num_blocks for other in self._offers.values())
        if self._scheduler is not None:
            if num_pages < self._scheduler.num_pages:
                raise StartError(
                    f"The new worker has room for {num_pages} KV blocks; the one that died had "
                    f"{self._scheduler.num_pages}."
                )
            num_pages = self._scheduler.num_pages
        rank_bytes = tuple(self._offers[rank].block_bytes for rank in range(config.num_ranks))
        self._tell_workers(OpenCache(num_pages, rank_bytes, self._hosts))
        if self._scheduler is not None:
            return
        self._open_connectors(rank_bytes, groups)
        connectors: list[TierConnector] = self._connectors
        if config.record_trace is not None:
            # Only its owner may read it: it holds what users wrote. `stop` closes it.
            path = config.record_trace if self._epoch == 1 else f"{config.record_trace}.{self._epoch}"
            self._trace = open(path, "wb", opener=partial(os.open, mode=0o600))  # noqa: SIM115
            connectors = [trace.TracedConnector(connector, self._record) for connector in connectors]
        extensions = []
        if config.extension is not None:
            kind, options = load_extension(config.extension)
            extensions = [kind.core(options) for _ in range(config.kv_domains)]
        by_args = offer.keys_by_args
        self._scheduler = trace.make_schedulers(config, num_pages, connectors, extensions, groups, keys_by_args=by_args)
        self._scheduler.counters.expert_share = max(other.reads.expert_share for other in self._offers.values())
        self._record(trace.Opened(config, num_pages, groups, by_args))
        if self._settings != config:
            self._change(self._scheduler)
        early, self._early = self._early, []
        self.handle(list(early))
        if self._clients is not None:
            self._clients.open(self._scheduler.max_model_len, self.hear_clients)

    def _open_connectors(self, rank_bytes: tuple[int, ...], groups: tuple[GroupShape, ...]) -> None:
        """Opens the KV connector of each domain, if there are any; `stop` closes them. Raises ConfigError."""
        config = self._config
        for domain in range(config.kv_domains):
            specs = of_domain(config.kv_connector, domain, config.kv_domains)
            may_refuse = self._epoch == 1
            facts = ConnectorFacts.of(config, rank_bytes, groups, rank=domain, may_refuse=may_refuse, hosts=self._hosts)
            if (connector := core_connector(specs, facts)) is not None:
                self._connectors.append(connector)

    def _settle(self, settings: Settings) -> None:
        """Follows other settings, unless they were sent to a process before this one."""
        if settings.number > self._settings_number:
            self._settings, self._settings_number = settings.engine, settings.number
            if self._scheduler is not None:
                self._change(self._scheduler)

    def _change(self, scheduler: AnyScheduler) -> None:
        """The settings hold from the next plan on."""
        self._record(trace.Changed(self._settings))
        scheduler.change(trace.adjustable(self._settings))
        for domain, connector in enumerate(self._connectors):
            resize(connector, of_domain(self._settings.kv_connector, domain, self._config.kv_domains))

    @property
    def _has_workers(self) -> bool:
        """Every rank has offered its blocks."""
        return len(self._offers) == len(self._workers)

    def _reset(self, reset: Reset) -> None:
        """A process has died. The api will submit its requests again. The core's own clients are asked to submit again
        those of their requests that are lost with a worker or with the grammar process; their other requests go on."""
        self._early.clear()
        has_lost_workers = reset.device_epoch != self._device_epoch
        self._device_epoch = reset.device_epoch
        self._balancer.drop()  # what it has sent may be void
        if has_lost_workers:
            self._offers.clear()
            self._usages.clear()
            self._transfers.forget()
            self._balancer.forget()
        scheduler = self._scheduler
        if scheduler is None:
            return
        if has_lost_workers:
            self._record(trace.WorkerLost())
            scheduler.reset()
            self._sleep.forget()
        requests = scheduler.requests
        dropped = {rid for rid in requests if rid < CLIENT_RIDS}
        if self._clients is not None:
            lost = [rid for rid, request in requests.items() if has_lost_workers or request.is_constrained]
            dropped.update(self._clients.begin_anew((*lost, *self._unsure)))
            for rid in (rid for rid in self._unsure if rid >= CLIENT_RIDS):
                self._clients.reply(Failed(rid, "unavailable", reset.reason))
        self._unsure.clear()
        self._unsure_since.clear()
        self._given_up.clear()
        self._cancel(Cancel(tuple(sorted(dropped & requests.keys()))))
        scheduler.constraints.take()  # the grammar process has dropped them all
        self._mask_times.forget()
        outputs = scheduler.take_outputs()
        if self._clients is not None:
            self._clients.sort(outputs)

    def hear_clients(self) -> None:
        """Handles the messages of the core's own clients."""
        if self._clients is not None and (asked := self._clients.drain()):
            self.handle(list(asked))

    def _advance(self, scheduler: AnyScheduler) -> None:
        """Sends plans to the workers first, and outputs to the detokenizer while they compute."""
        if scheduler.has_deadlines:
            now = time.monotonic()
            self._record(trace.Expired(now))
            scheduler.expire(now)
        self._tell_late(scheduler)
        if (sampled := scheduler.constraints.take()) is not None:
            self._post("grammar", sampled)
            self._mask_times.asked(memoryview(sampled.rids).cast("q"), time.monotonic())
            self._mask_times.ended(memoryview(sampled.ended).cast("q"))
        if scheduler.num_constrained and (lateness := self._lateness()) != scheduler.lateness:
            self._record(trace.Late(lateness))
            scheduler.set_lateness(lateness)
        self._sleep.pause(scheduler)
        if scheduler.is_paused:
            self._balancer.drop()  # ranks that sleep forget what they have read
        while self._has_workers and not self._sleep.is_asleep and self._plan(scheduler):
            pass
        if self._has_workers:
            self._sleep.settle(scheduler)
        is_busy = bool(scheduler.num_running or scheduler.num_waiting)
        if self._was_busy and not is_busy:
            self._tell_counters(scheduler)  # before the last output, so that /metrics shows a request that has ended
        self._was_busy = is_busy
        outputs = scheduler.take_outputs()
        for item in outputs if self._clients is None else self._clients.sort(outputs):
            if isinstance(item, Opened):
                times = structs.replace(item.times, started=time.monotonic(), num_cached=item.num_cached)
                item = structs.replace(item, times=times)
            self._post("detokenizer", item)
        for cancel in () if self._clients is None else self._clients.flush():
            self._cancel(cancel)
        self._tell_late(scheduler)  # of those that were cancelled
        if not self._is_watching and scheduler.late():
            self._watch()
        if self._kv_events is not None:
            for domain, own in enumerate(scheduler.schedulers):
                self._kv_events.publish(own.take_kv_events(), domain)
        if scheduler.asks_again and not self._asks_again:
            with contextlib.suppress(RuntimeError):  # without a loop, the caller of the actors calls `handle` again
                asyncio.get_running_loop().call_later(_ASK_AGAIN_S, self._ask_again)
                self._asks_again = True

    def _plan(self, scheduler: AnyScheduler) -> bool:
        """Sends the plan of the next step, or that of each domain, if there is something to do."""
        plan = scheduler.plan()
        self._record(trace.Planned.of(plan))
        if plan is None:
            return False
        if scheduler.num_in_flight == 1:
            self._oldest_plan_at = time.monotonic()
        if isinstance(plan, tuple):
            for name, own in zip(self._workers, plan, strict=True):
                self._post(name, own)
        else:
            self._tell_workers(plan)
        return True

    def _lateness(self) -> Lateness:
        """Whether plans may wait for masks. A grammar that is compiled would hold the masks up, and a domain that waits
        the others."""
        if self._unsure or self._config.kv_domains > 1:
            return "never"
        return "always" if self._mask_times.are_quick else "alone"

    def _tell_late(self, scheduler: AnyScheduler) -> None:
        for message in scheduler.take_late_masks():
            self._tell_workers(message)

    def _watch(self) -> None:
        with contextlib.suppress(RuntimeError):  # without a loop, grammars run in the same thread and always answer
            asyncio.get_running_loop().call_later(LIMIT_S / 2, self._take_back)
            self._is_watching = True

    def _take_back(self) -> None:
        """Lets plans in flight go on without the requests whose masks take too long."""
        self._is_watching = False
        scheduler = self.scheduler
        overdue = self._mask_times.overdue(time.monotonic())
        if rids := tuple(rid for rid in scheduler.late() if rid in overdue):
            self._record(trace.TookBack(rids))
            scheduler.take_back(rids)
            self._advance(scheduler)
        elif scheduler.late():
            self._watch()

    def _tell_workers(
        self, message: OpenCache | StepPlan | LateMasks | Sleep | Wake | ReadExperts | PlaceExperts
    ) -> None:
        for name in self._workers:
            self._post(name, message)

    def _tell_sleep(self, message: Slept) -> None:
        self._report()  # before it: the api must know the state by then
        self._post("api", message)

    def _ask_again(self) -> None:
        self._asks_again = False
        self._advance(self.scheduler)

    def _report(self) -> None:
        scheduler = self._scheduler
        if scheduler is None:
            return
        if self._idle_check.is_due(scheduler) and (flaw := scheduler.mend()) is not None:
            self._record(trace.Mended())
            log.error("rows and KV blocks did not add up and were counted again: %s", flaw)
        snapshot = self._tell_counters(scheduler)
        self._begin_move(scheduler)
        for cancel in () if self._clients is None else self._clients.beat(snapshot):
            self._cancel(cancel)

    def _begin_move(self, scheduler: AnyScheduler) -> None:
        """Has the ranks read experts that relieve the busiest of them, if it is time to. They say in `WorkerUsage` when
        they have."""
        if not self._has_workers or scheduler.is_paused:
            return
        is_quiet = not scheduler.has_prompts
        if (move := self._balancer.next(self._expert_loads, time.monotonic(), is_quiet=is_quiet)) is not None:
            self._tell_workers(move)

    def _worker_snapshots(self, scheduler: AnyScheduler) -> tuple[WorkerSnapshot, ...]:
        """What the ranks have reported, and what of the KV cache's memory is in use."""
        num_domains = self._config.kv_domains
        totals, window = self._roof.report(time.monotonic(), scheduler.counters, num_domains)
        found = []
        for rank, usage in sorted(self._usages.items()):
            offer, own = self._offers[rank], scheduler.of_rank(rank)
            size = offer.block_bytes
            in_host = sum(tier.num_blocks for tier in own.tiers() if tier.name == "host")
            memory = dict(usage.memory)
            if kv_cache := memory.pop("kv_cache", 0):
                used, cached = (size * num for num in own.pages())
                memory |= {"kv_used": used, "kv_cached": cached, "kv_free": max(0, kv_cache - used - cached)}
            if in_host:
                memory["host_tier"] = size * in_host
            ratio = share_of_roof(window, offer.reads, size, usage.bandwidth)
            num_bytes = int(totals.read_bytes(offer.reads, size))
            found.append(WorkerSnapshot(usage, memory, num_bytes, ratio))
        return tuple(found)

    def _tell_counters(self, scheduler: AnyScheduler) -> Snapshot:
        counters = scheduler.counters
        times = self._pipeline_times
        stages, bubble_ratio = ((), 0.0) if times is None else times.report()
        prompt_ms, load_ms = scheduler.prices()
        snapshot = Snapshot(
            step=scheduler.step,
            num_running=scheduler.num_running,
            num_waiting=scheduler.num_waiting,
            num_blocks=scheduler.num_pages * scheduler.num_domains,
            num_blocks_used=scheduler.num_pages_held,
            num_preemptions=counters.num_preemptions,
            num_prompt_tokens=counters.num_prompt_tokens,
            num_cached_tokens=counters.num_cached_tokens,
            num_output_tokens=counters.num_output_tokens,
            step_age_s=self.step_age_s,
            tiers=scheduler.tiers(),
            num_drafts=counters.num_drafts,
            num_draft_tokens=counters.num_draft_tokens,
            num_accepted_tokens=counters.num_accepted_tokens,
            num_out_of_memory=counters.num_out_of_memory,
            num_mended=counters.num_mended,
            num_taken_back=counters.num_taken_back,
            num_failed_calls=counters.num_failed_calls,
            num_slow_calls=counters.num_slow_calls,
            prompt_ms=prompt_ms,
            load_ms=load_ms,
            is_asleep=scheduler.is_paused,
            groups=scheduler.groups(),
            failed_kernels=self._failed_kernels,
            stages=stages,
            bubble_ratio=bubble_ratio,
            expert_tokens=self._expert_loads.tokens,
            expert_imbalance=self._expert_loads.imbalance,
            rank_sent_bytes=self._expert_loads.sent_bytes,
            workers=self._worker_snapshots(scheduler),
            histograms={
                "step_decode_rows": counters.step_decode_rows.report(),
                "step_prompt_tokens": counters.step_prompt_tokens.report(),
                "iteration_tokens_total": counters.step_tokens.report(),
                **self._step_times.report(),
            },
        )
        self._post("api", snapshot)
        return snapshot
