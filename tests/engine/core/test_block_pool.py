"""The pool's own rules: eviction order, the index, and what a match may return."""

import pytest

from pagewire.engine.core.block_hash import block_key, root_key
from pagewire.engine.core.block_pool import BlockPool
from pagewire.engine.core.eviction import EvictionName
from pagewire.engine.core.groups import Groups
from pagewire.ipc.messages import GroupShape


def test_idle_blocks_are_found_again_and_evicted_tail_first() -> None:
    pool = BlockPool(num_pages=4)
    blocks = pool.allocate(3)
    keys = [b"a", b"b", b"c"]
    for place, (block, key) in enumerate(zip(blocks, keys, strict=True)):
        pool.register(block, key, place)
    pool.release(blocks)
    assert pool.match(keys) == blocks and pool.num_free == 4
    pool.allocate(2)  # the block that was never used, then the tail of the released table
    assert pool.match(keys) == blocks[:2]
    pool.check([[blocks[2], 3]])


def test_a_hit_keeps_its_block_from_eviction() -> None:
    pool = BlockPool(num_pages=2)
    (block,) = pool.allocate(1)
    pool.register(block, b"a", 0)
    pool.release([block])
    pool.hold(pool.match([b"a"]))
    assert pool.num_free == 1 and pool.allocate(1) != [block]
    pool.check([[0], [1]])


def test_the_first_block_with_a_key_keeps_it() -> None:
    pool = BlockPool(num_pages=2)
    first, second = pool.allocate(2)
    pool.register(first, b"a", 0)
    pool.register(second, b"a", 0)
    assert pool.match([b"a"]) == [first]
    pool.release([second])
    pool.release([first])
    pool.forget_all()
    assert pool.match([b"a"]) == [] and pool.num_free == 2
    pool.check([])


def test_keys_differ_by_model_salt_parent_and_ids() -> None:
    roots = {root_key(b"m", b""), root_key(b"m", b"s"), root_key(b"ms", b""), root_key(b"", b"ms")}
    roots |= {root_key(b"m", b"s", b"a"), root_key(b"ma", b"s"), root_key(b"m", b"as"), root_key(b"", b"s", b"m")}
    assert len(roots) == 8
    root = root_key(b"m", b"")
    assert len({block_key(root, b"1234"), block_key(root, b"1235"), block_key(block_key(root, b"1234"), b"1234")}) == 3


@pytest.mark.parametrize(("eviction", "victim"), [("lru", b"often"), ("lfu", b"late"), ("cost", b"late")])
def test_the_eviction_policy_chooses_the_idle_block(eviction: EvictionName, victim: bytes) -> None:
    pool = BlockPool(num_pages=2, eviction=eviction)
    often, late = pool.allocate(2)
    pool.register(often, b"often", 500, b"before")
    for _ in range(3):
        pool.hold([often])
        pool.release([often])
    pool.register(late, b"late", 0)
    pool.release([often])
    pool.release([late])
    pool.check([])
    assert pool.allocate(1) == [{b"often": often, b"late": late}[victim]]
    assert [evicted.key for evicted in pool.evicted] == [victim]
    pool.forget_all()
    assert pool.num_free == 1 and pool.match([b"often"]) == []


GROUPS = Groups([GroupShape("full", 0, 2), GroupShape("window", 8, 3), GroupShape("state", 0, 1)])


def test_a_block_is_as_many_pages_as_its_group_says() -> None:
    pool = BlockPool(num_pages=12, groups=GROUPS)
    full, window, state = pool.allocate(2), pool.allocate(1, 1), pool.allocate(1, 2)
    assert [len(pool.pages(blocks)) for blocks in (full, window, state)] == [4, 3, 1] and pool.num_free == 4
    assert len({*pool.pages(full), *pool.pages(window), *pool.pages(state)}) == 8
    pool.check([full, window, state])
    assert (pool.num_in(full + window), pool.num_only_held(full + window), pool.num_idle(full)) == (7, 7, 0)
    pool.release(window)
    assert pool.num_free == 7
    pool.check([full, state])


@pytest.mark.parametrize("eviction", ["lru", "lfu", "cost"])
def test_an_evicted_block_of_one_group_serves_another(eviction: EvictionName) -> None:
    pool = BlockPool(num_pages=6, groups=GROUPS, eviction=eviction)
    window = pool.allocate(2, 1)
    for place, (block, key) in enumerate(zip(window, (b"a", b"b"), strict=True)):
        pool.register(block, key, place, b"a" if place else None)
    pool.release(window)
    assert pool.match([b"a", b"b"], 1) == window and pool.match([b"a"]) == [], "each group has its own index"
    assert pool.num_free == pool.num_idle(window) == 6
    full = pool.allocate(1)
    assert pool.match([b"a", b"b"], 1) == window[:1] and pool.num_free == 4
    assert [(e.key, e.group) for e in pool.evicted] == [(b"b", 1)]
    pool.check([full])
    pool.rebuild([full])
    pool.check([full])
    assert pool.num_free == 4
