"""The host tier: which blocks it keeps, in which slots, and how they are loaded."""

import random

import pytest
from kv_instance import BLOCK_BYTES, FACTS, SIZE, Instance, held, sequence
from msgspec import msgpack

from pagewire.engine.core.eviction import EvictionQueue, Lru
from pagewire.engine.core.kv_connector import Evicted
from pagewire.engine.kv_connector import host
from pagewire.engine.kv_connector.host import HostCore
from pagewire.engine.kv_connector.host_meta import HostMeta
from pagewire.ipc.messages import Transferred


def core_of(num_slots: int) -> HostCore:
    return HostCore(num_slots=num_slots, facts=FACTS, queue=EvictionQueue(Lru()))


def loading() -> tuple[HostCore, list[bytes]]:
    """Two slots, from which request 1 loads both blocks, and the keys of these."""
    core, request = core_of(2), sequence(1, (1, 2 * SIZE + 1))
    keys = request.block_keys(2, SIZE)
    core.blocks_evicted([Evicted(0, keys[1], 1), Evicted(1, keys[0], 0)])
    core.build_connector_meta()
    core.load(request, held(request, [5, 6]))
    return core, keys


def test_evicted_blocks_are_loaded_again() -> None:
    engine = Instance(f"host,size={64 * BLOCK_BYTES}")
    engine.serve(sequence(1, (1, 10 * SIZE + 2)))
    assert engine.core.tiers()[0].num_blocks == 0, "nothing is copied while the device has it"
    engine.fill_device(2)
    assert engine.serve(sequence(3, (1, 10 * SIZE + 2))) == 10
    engine.fill_device(4)
    tier = engine.core.tiers()[0]
    stored = tier.num_stored
    engine.fill_device(5)
    assert (tier.name, tier.capacity, tier.num_hit_tokens, tier.num_failed) == ("host", 64, 10 * SIZE, 0)
    assert engine.core.tiers()[0].num_stored == stored + 24, "blocks that the host has are not copied again"


def test_blocks_of_a_preempted_request_are_loaded_again() -> None:
    engine = Instance(f"host,size={64 * BLOCK_BYTES}", num_blocks=12)
    request = engine.run(sequence(1, (1, 8 * SIZE + 1)))
    engine.preempt(request)
    engine.fill_device(2)
    assert engine.serve(sequence(1, (1, 8 * SIZE + 1))) == 8


def test_events_name_the_tier_of_each_block() -> None:
    engine = Instance(f"host,size={9 * BLOCK_BYTES}", num_blocks=12)
    rng = random.Random(3)
    present: set[bytes] = set()
    for i in range(40):
        engine.serve(sequence(i, (rng.randrange(4), 5 * SIZE), (rng.randrange(9), rng.randrange(4 * SIZE))))
        for event in engine.core.take_events():
            assert event.tier == "host"
            if event.stored:
                assert present.isdisjoint(event.keys)
                present |= set(event.keys)
            else:
                assert present >= set(event.keys)
                present -= set(event.keys)
        assert len(present) == engine.core.tiers()[0].num_blocks <= 9
    engine.core.reset()
    for event in engine.core.take_events():
        present -= set(event.keys)
    assert not present


def test_a_block_evicted_after_its_match_fails_to_load() -> None:
    engine = Instance(f"host,size={4 * BLOCK_BYTES}", num_blocks=12)
    engine.serve(sequence(1, (1, 4 * SIZE + 1)))
    engine.fill_device(2)
    request = sequence(3, (1, 4 * SIZE + 1))
    assert engine.core.get_num_new_matched_tokens(request, 0) == (4 * SIZE, True)
    key = request.keys[3]
    core = engine.core
    core._drop(key)
    request.blocks = engine.pool.allocate(4)
    engine.loading[3] = (request, 0)
    core.update_state_after_alloc(request, request.blocks, 4 * SIZE)
    engine.step()
    assert engine.failed == [key]
    assert request.num_computed == 3 * SIZE


def test_of_more_evicted_blocks_than_slots_the_newest_are_kept() -> None:
    core = core_of(3)
    core.blocks_evicted([Evicted(i, bytes([i]) * 32, i) for i in range(9)])
    assert core.tiers()[0].num_blocks == 3
    assert sorted(core._saves.values()) == [6, 7, 8], "one block a slot, the newest"


def test_slots_that_are_being_loaded_are_not_reused() -> None:
    core, keys = loading()
    core.blocks_evicted([Evicted(2, b"other".ljust(32), 0)])
    assert core._saves == {}
    core.update_connector_output(Transferred((1,), b"", ()))
    core.blocks_evicted([Evicted(2, b"other".ljust(32), 0)])
    assert list(core._saves.values()) == [2]
    assert keys[0] in core._kept, "the tail is evicted first"


def test_a_smaller_tier_gives_up_a_part_with_each_plan_and_grows_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "_AT_ONCE", 3)
    engine = Instance(f"host,size={24 * BLOCK_BYTES}")
    engine.serve(sequence(1, (1, 20 * SIZE + 2)))
    engine.fill_device(2)
    engine.fill_device(3)
    core: HostCore = engine.core.core
    assert core.tiers()[0].num_blocks == 24
    core.resize(8 * BLOCK_BYTES)
    sizes = []
    while (meta := core.build_connector_meta()) and len(sizes) < 20:
        returned = msgpack.decode(meta, type=HostMeta).returned
        sizes.append((len(returned) // 4, core.tiers()[0].num_blocks, core.tiers()[0].capacity))
    assert sizes == [(3, 21, 21), (3, 18, 18), (3, 15, 15), (3, 12, 12), (3, 9, 9), (1, 8, 8)]
    core.resize(100 * BLOCK_BYTES)  # no more than at the start
    assert core.tiers()[0].capacity == 24 and sorted([*core._free, *_slots(core)]) == [*range(24)]
    core.resize(1)
    core.reset()
    assert core.tiers()[0].capacity == 1 and len(core._free) == 1


def _slots(core: HostCore) -> list[int]:
    return [slot for kept in core._kept.values() for slot in kept.slots]


def test_what_is_being_loaded_leaves_a_smaller_tier_when_the_load_is_over() -> None:
    core, keys = loading()
    core.resize(BLOCK_BYTES)
    core.build_connector_meta()
    assert core.tiers()[0].num_blocks == 2 and core.tiers()[0].capacity == 1
    core.update_connector_output(Transferred((1,), b"", ()))
    assert core.tiers()[0].num_blocks == 1 and keys[0] in core._kept
    assert len(msgpack.decode(core.build_connector_meta(), type=HostMeta).returned) == 4
