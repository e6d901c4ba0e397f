"""The order in which a tier evicts blocks: the rules of every policy, and the order of each."""

import random
from collections.abc import Callable
from itertools import pairwise

import pytest

from pagewire.engine.core.eviction import RANKINGS, EvictionQueue

POLICIES = pytest.mark.parametrize("policy", sorted(RANKINGS))


def queue_of(policy: str) -> EvictionQueue:
    return EvictionQueue(RANKINGS[policy]())


def name(sequence: int, place: int) -> bytes:
    return f"{sequence}.{place}".encode()


def drain(queue: EvictionQueue) -> list[bytes]:
    keys = []
    while (victim := queue.evict()) is not None:
        keys.append(victim.key)
    return keys


@POLICIES
def test_random_histories(policy: str) -> None:
    for seed in range(60):
        rng = random.Random(seed)
        queue = queue_of(policy)
        present: set[bytes] = set()
        parents: dict[bytes, bytes] = {}
        pins: list[bytes] = []
        num_evicted = 0
        for _ in range(300):
            length = rng.randrange(1, 8)
            chain = [name(rng.randrange(6), 0)]
            chain = [name(int(chain[0].split(b".")[0]), place) for place in range(length)]
            match rng.randrange(6):
                case 0 | 1:
                    for i in reversed(range(length)):
                        parent = chain[i - 1] if i else None
                        if chain[i] in present:
                            queue.touched(chain[i], parent)
                        else:
                            queue.added(chain[i], i, parent)
                            present.add(chain[i])
                        if parent is not None:
                            parents[chain[i]] = parent
                case 2:
                    queue.used(chain)
                    parents |= {c: p for p, c in pairwise(chain) if c in present}
                case 3:
                    key = rng.choice(chain)
                    queue.pin(key)
                    pins.append(key)
                case 4 if pins:
                    queue.unpin(pins.pop(rng.randrange(len(pins))))
                case 5:
                    if rng.random() < 0.2 and chain[-1] in present:
                        queue.removed(chain[-1])
                        present.remove(chain[-1])
                        parents.pop(chain[-1], None)
                    victim = queue.evict()
                    free = present - set(pins)
                    if victim is None:
                        assert not free, f"seed {seed}: {free} could have been evicted"
                        continue
                    num_evicted += 1
                    assert victim.key in free, f"seed {seed}: {victim} is pinned or not present"
                    assert int(victim.key.split(b".")[1]) == victim.place
                    followers = {c for c in free if parents.get(c) == victim.key}
                    assert not followers, f"seed {seed}: {victim} is evicted before {followers}"
                    present.remove(victim.key)
                    parents.pop(victim.key, None)
            assert len(queue) == len(present) and all(key in queue for key in present), f"seed {seed}"
        assert num_evicted > 10
        for key in pins:
            queue.unpin(key)
        assert set(drain(queue)) == present and len(queue) == 0


@POLICIES
def test_a_sequence_is_evicted_from_its_tail(policy: str) -> None:
    queue = queue_of(policy)
    for i in (3, 2, 1, 0):
        queue.added(name(0, i), i, name(0, i - 1) if i else None)
    assert drain(queue) == [name(0, i) for i in (3, 2, 1, 0)]


@POLICIES
def test_used_names_the_predecessors_of_blocks_that_were_added_without_one(policy: str) -> None:
    queue = queue_of(policy)
    for i in range(4):
        queue.added(name(0, i), i)
    queue.used([name(0, i) for i in range(4)])
    assert drain(queue) == [name(0, i) for i in (3, 2, 1, 0)]


@POLICIES
def test_a_block_is_evicted_only_after_its_last_pin_is_removed(policy: str) -> None:
    queue = queue_of(policy)
    queue.added(b"a", 0)
    queue.pin(b"a")
    queue.pin(b"a")
    assert queue.evict() is None
    queue.unpin(b"a")
    assert queue.evict() is None
    queue.unpin(b"a")
    assert drain(queue) == [b"a"]


def eviction_order(queue: EvictionQueue) -> list[bytes]:
    """The order of three blocks: an early one used often, one late in a long sequence, an early one used last."""
    queue.added(b"often", 0)
    queue.added(b"late", 2000)
    queue.added(b"new", 0)
    for key in (b"often", b"often", b"late", b"new"):
        queue.used([key])
    return drain(queue)


@pytest.mark.parametrize(
    ("policy", "order"),
    [
        ("lru", [b"often", b"late", b"new"]),
        ("lfu", [b"late", b"new", b"often"]),
        ("cost", [b"often", b"new", b"late"]),
    ],
)
def test_the_order_in_which_each_policy_evicts(policy: str, order: list[bytes]) -> None:
    assert eviction_order(queue_of(policy)) == order


def test_cost_evicts_an_expensive_block_that_is_never_used() -> None:
    queue = queue_of("cost")
    queue.added(b"expensive", 1000)
    for i in range(100):
        queue.added(name(0, i), 0)
        victim = queue.evict()
        assert victim is not None
        if victim.key == b"expensive":
            break
    assert 2 < i < 50


@POLICIES
def test_the_heap_does_not_grow_with_use(policy: str) -> None:
    queue = queue_of(policy)
    chain = [name(0, i) for i in range(10)]
    for i in reversed(range(10)):
        queue.added(chain[i], i, chain[i - 1] if i else None)
    for _ in range(1000):
        queue.used(chain)
    assert len(queue._heap) <= 2 * 10 + 64 + 1


@POLICIES
def test_evicting_a_long_chain_takes_linear_work(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    queue = queue_of(policy)
    num = 2000
    chain = [name(0, i) for i in range(num)]
    for i in range(num):  # the head first: the worst order for the queue
        queue.added(chain[i], i, chain[i - 1] if i else None)
    pushes = 0
    push: Callable[..., None] = EvictionQueue._push

    def counted(self: EvictionQueue, *args: object) -> None:
        nonlocal pushes
        pushes += 1
        push(self, *args)

    monkeypatch.setattr(EvictionQueue, "_push", counted)
    assert drain(queue) == chain[::-1]
    assert pushes < 20 * num, pushes
