"""The step trace: every call of the scheduler and every plan, in order.

The scheduler has no clock, no I/O and no randomness, so the same calls must give the same plans bit by bit; `replay`
checks it. A KV connector has all three, so its answers are recorded and replayed. A trace is a sequence of frames, each
4 bytes of little-endian length and a msgpack message.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import BinaryIO, assert_never

import msgspec
from msgspec import Struct, structs

from ...config.config import EngineConfig, ModelFacts
from ...ipc.messages import Cancel, Enqueue, GroupShape, Masks, StepPlan, StepResult, StopHit, TierSnapshot, Transferred
from .block_pool import BlockPool
from .domains import AnyScheduler, Domains, Plans
from .extension import PlanExtension
from .groups import PLAIN, Groups
from .kv_connector import ChunkConnector, DomainTier, Evicted, Held, Item, KvEvent, KvRequest, TierConnector
from .planner import Lateness
from .scheduler import Adjustable, Scheduler
from .speculation import num_draft_tokens


class Opened(Struct, frozen=True, array_like=True, tag=True):
    """The first frame: the scheduler's configuration."""

    config: EngineConfig
    num_blocks: int  # pages, if there are groups
    groups: tuple[GroupShape, ...] = ()  # as in `CacheOffer`
    keys_by_args: bool = False  # as there


class Arrived(Struct, frozen=True, array_like=True, tag=True):
    """`add` was called."""

    enqueue: Enqueue
    now: float


class Expired(Struct, frozen=True, array_like=True, tag=True):
    """`expire` was called."""

    now: float


class Planned(Struct, frozen=True, array_like=True, tag=True):
    """`plan` was called and returned this."""

    plan: StepPlan | None  # of the first KV domain
    others: tuple[StepPlan, ...] = ()  # of the other domains

    @classmethod
    def of(cls, found: StepPlan | Plans | None) -> "Planned":
        """What `plan` returned."""
        return cls(found[0], found[1:]) if isinstance(found, tuple) else cls(found)

    @property
    def plans(self) -> Plans:
        """Of each domain; empty: none was made."""
        return () if self.plan is None else (self.plan, *self.others)


class Matched(Struct, frozen=True, array_like=True, tag=True):
    """The connector answered `get_num_new_matched_tokens`; recorded before the plan that asked."""

    num: int | None
    is_async: bool


class Answered(Struct, frozen=True, array_like=True, tag=True):
    """The connector answered `available`."""

    available: tuple[bool, ...] | None


class Stood(Struct, frozen=True, array_like=True, tag=True):
    """The connector answered `standing`, and not that there are no states."""

    behind: bytes
    states: dict[bytes, int]


class Kept(Struct, frozen=True, array_like=True, tag=True):
    """The connector answered `request_finished`; recorded after the call that ended the request."""

    kept: bool


class Counted(Struct, frozen=True, array_like=True, tag=True):
    """The connector of a KV domain answered `num_kept`; recorded after the arrival that asked."""

    num: int


class WorkerLost(Struct, frozen=True, array_like=True, tag=True):
    """`reset` was called."""


class Paused(Struct, frozen=True, array_like=True, tag=True):
    """`is_paused` was set."""

    is_paused: bool


class Late(Struct, frozen=True, array_like=True, tag=True):
    """`set_lateness` was called."""

    lateness: Lateness


class TookBack(Struct, frozen=True, array_like=True, tag=True):
    """`take_back` was called."""

    rids: tuple[int, ...]


class Emptied(Struct, frozen=True, array_like=True, tag=True):
    """`empty` was called."""


class Changed(Struct, frozen=True, array_like=True, tag=True):
    """`change` was called, with what this configuration says."""

    config: EngineConfig


class Mended(Struct, frozen=True, array_like=True, tag=True):
    """`mend` was called, and something was wrong."""


Event = (
    WorkerLost
    | Paused
    | Late
    | TookBack
    | Emptied
    | Mended
    | Changed
    | Matched
    | Answered
    | Stood
    | Kept
    | Counted
    | Opened
    | Arrived
    | Cancel
    | StopHit
    | Expired
    | Planned
    | StepResult
    | Transferred
    | Masks
)

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Event).decode


def write(file: BinaryIO, event: Event) -> None:
    """Appends one frame."""
    data = _encode(event)
    file.write(len(data).to_bytes(4, "little") + data)


def read(file: BinaryIO) -> Iterator[Event]:
    """The frames of a trace. A last frame that is cut off is skipped: the engine may have been killed."""
    is_first = True
    while len(head := file.read(4)) == 4:
        data = file.read(int.from_bytes(head, "little"))
        if len(data) < int.from_bytes(head, "little"):
            return
        yield _decode(_nested(data) if is_first else data)
        is_first = False


def _nested(first: bytes) -> bytes:
    """The first frame with the model's facts in a struct of their own; until version 0.2 they were fields of the
    EngineConfig."""
    frame = msgspec.msgpack.decode(first)
    if not (isinstance(frame, list) and len(frame) == 3 and isinstance(frame[1], dict) and "model" not in frame[1]):
        return first
    config = frame[1]
    model = {name: config[name] for name in ModelFacts.__struct_fields__ if name in config}
    names = {"path": "model_path", "fingerprint": "model_fingerprint", "checkpoint_dtype": "dtype"}
    model |= {new: config[old] for new, old in names.items() if old in config}
    model |= {"name": "", "max_position": config.get("max_model_len")}
    return msgspec.msgpack.encode([frame[0], {**config, "model": model}, frame[2]])


class TracedConnector:
    """A connector whose answers are recorded."""

    def __init__(self, connector: TierConnector, record: Callable[[Event], None]) -> None:
        self._record = record
        self.load = connector.load
        self.build_connector_meta = connector.build_connector_meta
        self.blocks_evicted = connector.blocks_evicted
        self.update_connector_output = connector.update_connector_output
        self.take_events = connector.take_events
        self.tiers = connector.tiers
        self.reset = connector.reset
        self.close = connector.close
        self._connector = connector

    @property
    def wants_chunks(self) -> bool:
        return isinstance(self._connector, ChunkConnector) and self._connector.wants_chunks

    def filling(self, request: KvRequest, held: Sequence[Held]) -> None:
        """Passes it on; it has no answer that a replay would need."""
        assert isinstance(self._connector, ChunkConnector), self._connector
        self._connector.filling(request, held)

    def spoiled(self, request: KvRequest) -> None:
        """Passes it on; it has no answer that a replay would need."""
        assert isinstance(self._connector, ChunkConnector), self._connector
        self._connector.spoiled(request)

    def filled(self, request: KvRequest, held: Sequence[Held]) -> None:
        """It has no answer, so nothing is recorded."""
        assert isinstance(self._connector, ChunkConnector), self._connector
        self._connector.filled(request, held)

    def available(self, request: KvRequest, items: Sequence[Item]) -> Sequence[bool] | None:
        answer = self._connector.available(request, items)
        self._record(Answered(None if answer is None else tuple(answer)))
        return answer

    def standing(self, request: KvRequest, behind: bytes, place: int) -> Mapping[bytes, int]:
        states = self._connector.standing(request, behind, place)
        if states:
            self._record(Stood(behind, dict(states)))
        return states

    def num_kept(self, names: Sequence[bytes]) -> int:
        inner: object = self._connector  # of which mypy does not know that it can be both
        num = inner.num_kept(names) if isinstance(inner, DomainTier) else 0
        self._record(Counted(num))
        return num

    def ended(self, request: KvRequest, held: Sequence[Held]) -> bool:
        kept = self._connector.ended(request, held)
        self._record(Kept(kept))
        return kept


class ReplayedConnector:
    """A connector that gives the answers of a trace, those of all KV domains in the order in which they were asked."""

    def __init__(self, events: Iterator[Event]) -> None:
        self._events = events
        self.answers: deque[Matched | Answered | Stood] = deque()
        self.num_positions = 1  # of a block
        self.metadata: deque[bytes] = deque()  # of the next plans

    def available(self, request: KvRequest, items: Sequence[Item]) -> Sequence[bool] | None:
        match self.answers.popleft() if self.answers else None:
            case Matched(num):  # until version 0.2
                return None if num is None else [True] * (num // self.num_positions)
            case Answered(available):
                return available
        return ()  # the plan differs from the recorded one; their comparison reports it

    def standing(self, request: KvRequest, behind: bytes, place: int) -> Mapping[bytes, int]:
        match self.answers[0] if self.answers else None:
            case Stood(key, states) if key == behind:
                self.answers.popleft()
                return states
        return {}

    def ended(self, request: KvRequest, held: Sequence[Held]) -> bool:
        event = next(self._events, None)
        return isinstance(event, Kept) and event.kept

    def num_kept(self, names: Sequence[bytes]) -> int:
        event = next(self._events, None)
        return event.num if isinstance(event, Counted) else 0

    def build_connector_meta(self) -> bytes:
        return self.metadata.popleft() if self.metadata else b""

    def load(self, request: KvRequest, held: Sequence[Held]) -> None: ...

    def blocks_evicted(self, evicted: Sequence[Evicted]) -> None: ...

    def update_connector_output(self, output: Transferred) -> None: ...

    def take_events(self) -> list[KvEvent]:
        return []

    def tiers(self) -> tuple[TierSnapshot, ...]:
        return ()

    def reset(self) -> None: ...

    def close(self) -> None: ...


def make_scheduler(
    config: EngineConfig,
    num_pages: int,
    connector: TierConnector | None = None,
    extension: PlanExtension | None = None,
    groups: Sequence[GroupShape] = (),
    beside: Scheduler | None = None,
    *,
    keys_by_args: bool = False,
) -> Scheduler:
    """The scheduler of an engine with this configuration, or of one of its KV domains, pages of cache memory and cache
    groups (default: one full group, whose blocks are pages). beside: see `Scheduler`."""
    return Scheduler(
        **adjustable(config)._asdict(),
        pool=BlockPool(num_pages=num_pages, groups=Groups(groups) if groups else PLAIN, eviction=config.kv_eviction),
        block_size=config.block_size,
        max_model_len=config.max_model_len,
        depth=config.pipeline_depth,
        num_stages=config.pipeline_parallel_size,
        eos_token_ids=config.model.eos_token_ids,
        prefix_caching=config.enable_prefix_caching,
        model_key=config.kv_model_key,
        connector=connector,
        extension=extension,
        kv_events=config.kv_events is not None,
        keys_by_args=keys_by_args,
        is_chunked=not config.model.purpose.is_encoder,
        regime_limit=config.model.regime_limit,
        decoder_start_ids=config.model.decoder_start_ids,
        beside=beside,
    )


def make_schedulers(
    config: EngineConfig,
    num_pages: int,
    connectors: Sequence[TierConnector] = (),
    extensions: Sequence[PlanExtension] = (),
    groups: Sequence[GroupShape] = (),
    *,
    keys_by_args: bool = False,
) -> AnyScheduler:
    """The scheduler of an engine, or those of its KV domains. connectors, extensions: one for each domain; empty: none.
    The others as of `make_scheduler`."""

    def make(domain: int = 0, beside: Scheduler | None = None) -> Scheduler:
        connector = connectors[domain] if connectors else None
        extension = extensions[domain] if extensions else None
        return make_scheduler(config, num_pages, connector, extension, groups, beside, keys_by_args=keys_by_args)

    return make() if config.kv_domains == 1 else Domains(make, config.kv_domains)


def adjustable(config: EngineConfig) -> Adjustable:
    """What a configuration says about what may change between two steps."""
    return Adjustable(
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_queued_requests=config.max_queued_requests,
        max_queued_tokens=config.max_queued_tokens,
        policy=config.scheduling_policy,
        latency_classes=config.latency_classes or {},
        itl_target_ms=config.itl_target_ms,
        speculate=num_draft_tokens(config.speculative),
    )


def _comparable(plan: StepPlan, recorded: StepPlan) -> StepPlan:
    """The plan without what may differ from a recorded one."""
    plan = structs.replace(plan, extension=recorded.extension)  # nothing depends on it
    if any(row.rid for row in recorded.open):
        return plan
    return structs.replace(plan, open=tuple(structs.replace(row, rid=0) for row in plan.open))  # older traces


def replay(events: Iterable[Event]) -> tuple[int, str | None]:
    """Replays a trace. Returns (plans that were reproduced, one sentence about the first that was not or None)."""
    scheduler: AnyScheduler | None = None
    num_plans = 0
    events = iter(events)
    connector = ReplayedConnector(events)
    for event in events:
        if isinstance(event, Opened):
            config = structs.replace(event.config, kv_events=None)
            replayed = [connector] * config.kv_domains if config.kv_connector else []
            connector.num_positions = config.block_size
            by_args = event.keys_by_args
            scheduler = make_schedulers(config, event.num_blocks, replayed, groups=event.groups, keys_by_args=by_args)
            continue
        if scheduler is None:
            return 0, "This is not a step trace: its first frame is not the scheduler's configuration."
        match event:
            case Arrived():
                scheduler.add(event.enqueue, event.now)
            case Cancel():
                for rid in event.rids:
                    scheduler.cancel(rid)
            case StopHit():
                for rid in event.rids:
                    scheduler.stop_hit(rid)
            case Expired():
                scheduler.expire(event.now)
            case StepResult():
                scheduler.apply(event)
            case Transferred():
                scheduler.transferred(event)
            case Masks():
                scheduler.allow(event)
            case WorkerLost():
                scheduler.reset()
            case Paused():
                scheduler.is_paused = event.is_paused
            case Late():
                scheduler.set_lateness(event.lateness)
            case TookBack():
                scheduler.take_back(event.rids)
            case Emptied():
                scheduler.empty()
            case Mended():
                scheduler.mend()
            case Changed():
                scheduler.change(adjustable(event.config))
            case Matched() | Answered() | Stood():
                connector.answers.append(event)
            case Kept():
                return num_plans, f"After {num_plans} plans the connector was asked about a request that has not ended."
            case Counted():
                return (
                    num_plans,
                    f"After {num_plans} plans the connector was asked about a request that did not come.",
                )
            case Planned():
                connector.metadata = deque(plan.kv for plan in event.plans)
                found = Planned.of(scheduler.plan()).plans
                for plan, recorded in zip_longest(found, event.plans):
                    if plan is None or recorded is None or _comparable(plan, recorded) != recorded:
                        return num_plans, f"The plan after {num_plans} differs: {plan} instead of {recorded}."
                num_plans += bool(found)
            case _:
                assert_never(event)
    return num_plans, None
