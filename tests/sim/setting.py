"""The random configuration of a simulated engine and its clients."""

from random import Random
from typing import Literal

from fakes import StagedGroups

from pagewire.config.latency_classes import LatencyClass
from pagewire.engine.core import policy
from pagewire.engine.core.eviction import EvictionName
from pagewire.engine.core.groups import PLAIN, Groups
from pagewire.engine.core.planner import Lateness
from pagewire.ipc.messages import GroupShape

from .stores import TierOptions

BLOCK_SIZE = 4
_TIERS = [("free",), ("free",), ("host",), ("disk",), ("host", "disk"), ("free", "disk"), ("host", "free")]

Kind = Literal["full", "window", "chunk", "state"]


def _draw_groups(rng: Random) -> Groups:
    """One to three groups of any kinds and sizes; half of them have recurrent states."""
    num, has_state = rng.randint(1, 3), rng.random() < 0.5
    kinds: list[Kind] = rng.choices(["full", "full", "window", "chunk"], k=num - has_state)
    shapes = []
    for kind in [*kinds, *(["state"] if has_state else [])]:
        span = rng.choice([1, 3, 4, 6, 8, 9, 17]) if kind in ("window", "chunk") else 0
        shapes.append(GroupShape(kind, span, rng.randint(1, 6)))
    return Groups(shapes, interval=BLOCK_SIZE * rng.choice([1, 2, 4, 100]))


class Setting:
    """The configuration of an engine and its clients."""

    def __init__(self, rng: Random, num_stages: int = 1, *, has_encoder: bool = False) -> None:
        self.num_stages = num_stages
        self.num_blocks = rng.randint(4, 24)
        self.depth = rng.randint(1, 3)
        self.max_num_seqs = rng.randint(1, 8)
        self.budget = rng.choice([1, 3, 8, 16, 64, 64])
        self.max_len = min(self.num_blocks * BLOCK_SIZE, rng.randint(8, 80))
        self.policy: policy.PolicyName = rng.choice(["fcfs", "priority", "fair"])
        self.quantum = rng.choice([4, 16, 64])  # of fair
        self.prefix_caching = rng.random() < 0.85
        self.eviction: EvictionName = rng.choice(["lru", "lru", "lfu", "cost"])
        self.itl_target_ms = rng.choice([None, None, 1.1, 5.0])
        self.kv_events = rng.random() < 0.5
        self.max_queued_requests, self.max_queued_tokens = rng.choice([(1000, 10**6)] * 3 + [(3, 10**6), (1000, 150)])
        self.num_prompts = rng.randint(1, 12)
        self.arrival_span_s = rng.choice([0.0, 0.02, 0.1, 0.3])  # requests arrive within this time
        self.cancel_rate = rng.choice([0.0, 0.1, 0.4])
        self.cancel_loading_rate = rng.choice([0.0, 0.3])  # interruption of a load by a cancel or worker loss
        self.pause_rate = rng.choice([0.0, 0.0, 0.2])  # how likely the core stops planning although it could go on
        self.stop_rate = rng.choice([0.0, 0.2])
        self.stem_share = rng.choice([0.0, 0.7, 1.0])
        self.turn_share = rng.choice([0.0, 0.3, 0.7])
        self.worker_losses, self.core_losses = rng.choice([0, 0, 0, 1, 2]), rng.choice([0, 0, 0, 1])
        self.speculate = rng.choice([0, 1, 2, BLOCK_SIZE - 1])  # draft tokens of a row in a step
        self.draft_accuracy = rng.choice([0.0, 0.5, 0.9, 1.0])  # probability that a draft token is right
        self.constrained_share = rng.choice([0.0, 0.0, 0.4, 1.0])
        self.mask_s = rng.choice([0.0, 0.0002, 0.01])  # the most time that a mask takes
        self.latenesses: list[Lateness] = rng.choice(
            [["never"], ["alone"], ["always"], ["always"], ["never", "alone", "always"]]
        )
        self.take_back_rate = rng.choice([0.0, 0.0, 0.1, 0.5])  # how likely a mask that is asked for takes too long
        self.shortage_rate = rng.choice([0.0, 0.0, 0.03, 0.2])  # how likely a step starts a shortage of memory
        self.num_sleeps = rng.choice([0, 0, 0, 1, 2])
        self.groups, self.num_pages = PLAIN, self.num_blocks
        if rng.random() < 0.5:
            self.groups = _draw_groups(rng)
            fewest = self.groups.num_pages(0, self.max_len, 1, BLOCK_SIZE)
            self.num_pages = int(fewest * rng.choice([1.0, 1.2, 1.5, 2.0, 3.0]))
        self.tier: TierOptions | None = None
        if rng.random() < 0.7:
            kinds = rng.choice(_TIERS)
            self.tier = TierOptions(
                kinds=kinds,
                capacities=tuple(rng.choice([1, 2, 10, 100]) for _ in kinds),
                keeps_evicted=rng.random() < 0.8,
                saves_ended=rng.random() < 0.7,
                delays_sends=rng.random() < 0.5,
                defer_rate=rng.choice([0.0, 0.0, 0.3]),
                eviction=rng.choice(["lru", "lfu", "cost"]),
                fault_rate=rng.choice([0.0, 0.1, 0.5]),
                latency_s=rng.choice([0.0001, 0.003, 0.03]),
                block_ms=rng.choice([0.0, 0.01, 3.0]),
            )
        # Beyond so many ids, all positions of a sequence have another content.
        self.regime_limit = rng.randint(1, self.max_len) if rng.random() < 0.3 else None
        if (drawn := rng.random()) < 0.3:
            self.policy = "shortest" if drawn < 0.15 else "slo"
        self.patience = rng.choice([0.5, 10.0])  # of shortest: times what a request takes
        self.max_patience_ms = rng.choice([2.0, 10.0, 50.0])
        self.ageing_ms = rng.choice([5.0, 20.0, 100.0])  # of slo
        shares = [1.0, rng.choice([0.2, 0.6])] if rng.random() < 0.3 else [1.0]
        self.classes = {
            name: LatencyClass(
                rng.choice([None, 2.0, 20.0]), rng.choice([None, 1.1, 5.0]), rng.choice([1.0, 4.0]), rng.choice(shares)
            )
            for name in ("default", "a", "b")
        }
        self.has_shares = any(one.share < 1 for one in self.classes.values())
        self.longest_patience_s = float("inf")
        if self.policy == "shortest":
            self.longest_patience_s = self.max_patience_ms / 1e3
        elif self.policy == "slo":
            ages = [
                (one.ttft_ms or 0.0) + (1 + (one.share < 1)) * self.ageing_ms / one.weight
                for one in self.classes.values()
            ]
            self.longest_patience_s = max(ages) / 1e3
        if num_stages > 1:
            if self.groups.state is not None:  # a stage is not told how many draft tokens its states have moved over
                self.speculate = 0
            self.groups = StagedGroups(self.groups, num_stages)
            self.tier = None  # `tests/sim/stores.py` copies the blocks of one worker
        self.starts = self._with_encoder(rng) if has_encoder else ()  # ids with which a decoder beside one begins

    def _with_encoder(self, rng: Random) -> tuple[int, ...]:
        others = [shape for shape in _draw_groups(rng).shapes if shape.kind != "state"] or [*PLAIN.shapes]
        self.groups = Groups([*others, GroupShape("cross", 0, rng.randint(1, 4))])
        fewest = self.groups.num_pages(0, self.max_len, 1, BLOCK_SIZE)
        fewest += self.groups.cross_pages(self.max_len, BLOCK_SIZE)
        self.num_pages = int(fewest * rng.choice([1.0, 1.2, 1.5, 2.0, 3.0]))
        self.tier = self.regime_limit = None
        return rng.choice([(1,), (1, 2), (1, 2, 3, 4, 5)])
