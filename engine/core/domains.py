"""The schedulers of an engine with several KV domains, which plan every step together.

A domain is a part of the ranks that has requests, rows and a KV cache of its own; the feed-forward layers are computed
by the ranks of all domains together (`engine/parallel/domains.py`). So each domain has a `Scheduler`, with its own pool
and budget, and what is planned for one domain never depends on another. Only the step is common: every domain gets a
plan for each step, if need be an empty one, because its ranks must take part in it.

A request gets its domain when it arrives and keeps it. It is the one with the least to compute before and for it: an
idle domain, or the one that has its prefix on its device or in tiers of its own.
"""

from collections import ChainMap
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain

from msgspec.structs import replace

from ...ipc.messages import (
    Accepted,
    Enqueue,
    Failed,
    GroupSnapshot,
    LateMasks,
    Masks,
    StepPlan,
    StepResult,
    TierSnapshot,
    Transferred,
)
from .admission import Queued
from .block_hash import block_key, regime_key
from .constraints import Constraints
from .output_buffer import Item
from .planner import Lateness
from .request import Request
from .scheduler import Adjustable, Scheduler
from .stats import Counters

Plans = tuple[StepPlan, ...]
"""One for each domain, of the same step."""


class Domains:
    """Behaves as one `Scheduler`, but for `plan`. No plan waits for masks."""

    lateness: Lateness = "never"

    def __init__(self, make: Callable[[int, Scheduler | None], Scheduler], num_domains: int) -> None:
        """make: the scheduler of the domain of this number; given the first one, one beside it."""
        assert num_domains > 1, num_domains
        first = make(0, None)
        self._schedulers = (first, *(make(domain, first) for domain in range(1, num_domains)))
        self.num_domains = num_domains
        self._first = first
        self._pending: dict[int, list[bool]] = {}  # step in flight → for each domain, whether it has rows in it
        self._unanswered: dict[int, int] = {}  # step in flight → ranks whose answer is due
        self.step = 0  # of the last plans

    # ── a request's life ─────────────────────────────────────────────────────────────────────────────────────────────

    def change(self, asked: Adjustable) -> None:
        """Changes the schedulers of all domains, which share the policy of the first."""
        self._first.change(asked)
        for scheduler in self._schedulers[1:]:
            scheduler.change(asked, beside=self._first)

    def refusal(self, message: Enqueue) -> Failed | None:
        """Why the message cannot be taken, if so. The bound of the queue is that of all domains together."""
        queues = [scheduler.table.waiting for scheduler in self._schedulers]
        queued = Queued(sum(map(len, queues)), sum(queue.num_tokens for queue in queues))
        return self._first.admission.refusal(message, self.requests, queued)

    def add(self, message: Enqueue, now: float = 0.0) -> list[Accepted | Failed]:
        """Takes a request in, as a scheduler does. All its sequences go to one domain, because they begin alike."""
        if (refusal := self.refusal(message)) is not None:
            return [replace(refusal, rid=message.rid + i) for i in range(message.n)]
        return self._choose(message).add(message, now)

    def _choose(self, message: Enqueue) -> Scheduler:
        """The domain that has the fewest positions to compute until it has those of this request, too; the first of
        equals. What only its own tiers have counts as computed."""
        first, ids, keys = self._first, message.prompt_ids + message.resume_ids, list[bytes]()
        if first.prefix.enabled:
            regime = int(len(ids) // 4 > first.regime_limit)  # as `Request`
            keys = self._keys(ids, regime_key(first.root_of(message), regime))

        def num_positions(scheduler: Scheduler) -> int:
            return scheduler.backlog - scheduler.num_found(keys)

        return min(self._schedulers, key=num_positions)

    def _keys(self, ids: bytes, root: bytes) -> list[bytes]:
        """Of the full blocks of these ids, int32."""
        size, keys = 4 * self._first.block_size, [root]
        for start in range(0, len(ids) - size + 1, size):
            keys.append(block_key(keys[-1], ids[start : start + size]))
        return keys[1:]

    def allow(self, message: Masks) -> None:
        for scheduler in self._schedulers:
            scheduler.allow(message)  # knows its own requests

    def set_lateness(self, lateness: Lateness) -> None:
        """Other domains would wait in the next step for the one that waits for masks."""
        assert lateness == "never", lateness

    def take_late_masks(self) -> list[LateMasks]:
        return []

    def late(self) -> list[int]:
        return []

    def take_back(self, rids: Iterable[int]) -> None:
        raise AssertionError("no plan waits for masks")

    def plan(self) -> Plans | None:
        """The next step, or None if there is nothing to do in any domain, or so many steps are in flight already."""
        if len(self._pending) >= self._first.max_in_flight:
            return None
        found = [scheduler.plan() for scheduler in self._schedulers]
        if not any(found):
            return None
        self.step += 1
        for scheduler, plan in zip(self._schedulers, found, strict=True):
            if plan is None:
                scheduler.skip()
        counts = [() if plan is None else memoryview(plan.counts).cast("i").tolist() for plan in found]
        tokens, longest = tuple(map(sum, counts)), max(chain.from_iterable(counts), default=0)
        self._pending[self.step] = [plan is not None for plan in found]
        self._unanswered[self.step] = self.num_domains
        empty = StepPlan(self.step, (), b"", b"", b"", b"", b"")
        plans = (empty if plan is None else plan for plan in found)
        return tuple(replace(plan, domain_tokens=tokens, domain_longest=longest) for plan in plans)

    def apply(self, result: StepResult) -> None:
        """Takes in the result of one domain. Those of a domain come in the order of the steps; those of a step in any
        order. Raises ValueError if none of this step is due."""
        step, domain = result.step, result.domain
        if step not in self._pending:
            raise ValueError(f"domain {domain} answered step {step}, of which no answer was due")
        if self._pending[step][domain]:
            self._pending[step][domain] = False
            self._schedulers[domain].apply(result)
        self._unanswered[step] -= 1
        if not self._unanswered[step]:
            del self._pending[step], self._unanswered[step]

    def transferred(self, message: Transferred) -> None:
        """Takes in what the rank of a domain reports."""
        self._schedulers[message.rank].transferred(message)

    def take_outputs(self) -> list[Item]:
        return self._first.take_outputs()  # the schedulers share them

    def cancel(self, rid: int) -> None:
        for scheduler in self._schedulers:
            scheduler.cancel(rid)

    def stop_hit(self, rid: int) -> None:
        for scheduler in self._schedulers:
            scheduler.stop_hit(rid)

    def expire(self, now: float) -> None:
        for scheduler in self._schedulers:
            scheduler.expire(now)

    # ── the engine around it ─────────────────────────────────────────────────────────────────────────────────────────

    @property
    def requests(self) -> Mapping[int, Request]:
        return ChainMap(*(scheduler.table.requests for scheduler in self._schedulers))

    @property
    def num_constrained(self) -> int:
        return sum(scheduler.num_constrained for scheduler in self._schedulers)

    @property
    def constraints(self) -> Constraints:
        return self._first.constraints

    @property
    def counters(self) -> Counters:
        return self._first.counters

    @property
    def has_deadlines(self) -> bool:
        return any(scheduler.has_deadlines for scheduler in self._schedulers)

    @property
    def max_model_len(self) -> int:
        return self._first.max_model_len

    @property
    def num_pages(self) -> int:
        """Of each domain."""
        return self._first.num_pages

    @property
    def num_pages_held(self) -> int:
        """Of all domains."""
        return sum(scheduler.num_pages_held for scheduler in self._schedulers)

    @property
    def is_paused(self) -> bool:
        return self._first.is_paused

    @is_paused.setter
    def is_paused(self, value: bool) -> None:
        for scheduler in self._schedulers:
            scheduler.is_paused = value

    @property
    def has_prompts(self) -> bool:
        return any(scheduler.has_prompts for scheduler in self._schedulers)

    @property
    def num_waiting(self) -> int:
        return sum(scheduler.num_waiting for scheduler in self._schedulers)

    @property
    def num_running(self) -> int:
        return sum(scheduler.num_running for scheduler in self._schedulers)

    @property
    def num_in_flight(self) -> int:
        """Steps whose answers have not all come."""
        return len(self._pending)

    @property
    def is_busy(self) -> bool:
        return bool(self._pending) or any(scheduler.is_busy for scheduler in self._schedulers)

    @property
    def asks_again(self) -> bool:
        return any(scheduler.asks_again for scheduler in self._schedulers)

    def of_rank(self, rank: int) -> Scheduler:
        return self._schedulers[rank]

    def tiers(self) -> tuple[TierSnapshot, ...]:
        """Sums over the domains; the sizes of a tier that they have together are those that one of them knows of."""
        by_name: dict[str, list[TierSnapshot]] = {}
        for tier in chain.from_iterable(scheduler.tiers() for scheduler in self._schedulers):
            by_name.setdefault(tier.name, []).append(tier)
        return tuple(map(_sum_tiers, by_name.values()))

    def groups(self) -> tuple[GroupSnapshot, ...]:
        """Pages of all domains; the schedulers share the counts of found tokens."""
        each = zip(*(scheduler.groups() for scheduler in self._schedulers), strict=True)
        return tuple(_sum(group) for group in each)

    def prices(self) -> tuple[float, float]:
        """Milliseconds that a prompt token costs, computed and loaded. Those of one domain: they compute alike."""
        return self._first.prices()

    def reset(self) -> None:
        """Every rank was replaced."""
        self._pending.clear()
        self._unanswered.clear()
        for scheduler in self._schedulers:
            scheduler.reset()

    def empty(self) -> None:
        assert not self._pending, "a step is in flight"
        for scheduler in self._schedulers:
            scheduler.empty()

    def mend(self) -> str | None:
        flaws = [scheduler.mend() for scheduler in self._schedulers]
        return next((flaw for flaw in flaws if flaw is not None), None)

    @property
    def schedulers(self) -> Sequence[Scheduler]:
        """Of the domains."""
        return self._schedulers


AnyScheduler = Scheduler | Domains


def _sum(groups: Sequence[GroupSnapshot]) -> GroupSnapshot:
    return replace(
        groups[0],
        num_held=sum(group.num_held for group in groups),
        num_idle=sum(group.num_idle for group in groups),
    )


def _sum_tiers(tiers: Sequence[TierSnapshot]) -> TierSnapshot:
    size = max if tiers[0].is_common else sum
    return replace(
        tiers[0],
        num_blocks=size(tier.num_blocks for tier in tiers),
        capacity=size(tier.capacity for tier in tiers),
        num_hit_tokens=sum(tier.num_hit_tokens for tier in tiers),
        num_stored=sum(tier.num_stored for tier in tiers),
        num_evicted=sum(tier.num_evicted for tier in tiers),
        num_failed=sum(tier.num_failed for tier in tiers),
        num_loaded_bytes=sum(tier.num_loaded_bytes for tier in tiers),
    )
