"""What late subscribers are told: random histories of events against a plain copy of their meaning."""

import random

from pagewire.engine.core.kv_events import Cleared, KvCacheEvent, Removed, Stored
from pagewire.procs.kv_mirror import KvMirror


def key(number: int) -> bytes:
    return number.to_bytes(32, "big")


def test_a_random_history_is_told_as_it_ended_and_parents_first() -> None:
    for seed in range(50):
        rng = random.Random(seed)
        mirror = KvMirror()
        known: set[tuple[str, int | None, bytes]] = set()
        for _ in range(rng.randrange(200)):
            tier, group, first = rng.choice(("device", "host")), rng.choice((None, 1)), rng.randrange(30)
            keys = tuple(key(i) for i in range(first, min(30, first + rng.randrange(1, 4))))
            event: KvCacheEvent
            match rng.randrange(20):
                case 0:
                    event = Cleared()
                    known.clear()
                case n if n < 8:
                    event = Removed(keys, tier, group)
                    known -= {(tier, group, one) for one in keys}
                case _:
                    ids = bytes(4 * len(keys)) if tier == "device" else b""
                    event = Stored(keys, key(first - 1) if first and ids else None, ids, 1, tier, group)
                    known |= {(tier, group, one) for one in keys}
            mirror.apply(event)
        told: set[tuple[str, int | None, bytes]] = set()
        for block in mirror.blocks():
            (own,) = block.keys
            parent = (block.tier, block.group, block.parent)
            assert block.parent is None or parent in told or parent not in known, f"seed {seed}: a child before"
            assert (block.tier, block.group, own) not in told, f"seed {seed}: told twice"
            told.add((block.tier, block.group, own))
        assert told == known, f"seed {seed}"
        assert len(mirror) == len(known)


def test_blocks_that_came_together_are_told_one_by_one() -> None:
    mirror = KvMirror()
    mirror.apply(Stored((key(1), key(2)), None, bytes([1, 0, 0, 0, 2, 0, 0, 0]), 1, salt="alice"))
    assert mirror.blocks() == [
        Stored((key(1),), None, bytes([1, 0, 0, 0]), 1, salt="alice"),
        Stored((key(2),), key(1), bytes([2, 0, 0, 0]), 1),
    ]
