"""The host tier: which blocks it keeps, in which slots, and how they are loaded."""

import random

from kv_instance import BLOCK_BYTES, FACTS, SIZE, Instance, held, sequence

from pagewire.engine.core.eviction import EvictionQueue, Lru
from pagewire.engine.core.kv_connector import Evicted
from pagewire.engine.kv_connector.host import HostCore
from pagewire.ipc.messages import Transferred


def core_of(num_slots: int) -> HostCore:
    return HostCore(num_slots=num_slots, facts=FACTS, queue=EvictionQueue(Lru()))


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
    core = core_of(2)
    request = sequence(1, (1, 2 * SIZE + 1))
    keys = request.block_keys(2, SIZE)
    core.blocks_evicted([Evicted(0, keys[1], 1), Evicted(1, keys[0], 0)])
    core.build_connector_meta()
    core.load(request, held(request, [5, 6]))
    core.blocks_evicted([Evicted(2, b"other".ljust(32), 0)])
    assert core._saves == {}
    core.update_connector_output(Transferred((1,), b"", ()))
    core.blocks_evicted([Evicted(2, b"other".ljust(32), 0)])
    assert list(core._saves.values()) == [2]
    assert keys[0] in core._kept, "the tail is evicted first"
