"""What a p2p instance says that it has and computes, of several groups, and the blocks of several pages that a pass
fills."""

from itertools import pairwise

import pytest
import torch
from msgspec.structs import replace
from p2p_instance import BLOCK_BYTES, DIGEST, FACTS, FakeRequest, prompt

from pagewire.engine.core.kv_connector import item_name
from pagewire.engine.kv_connector.base import ConnectorFacts
from pagewire.engine.kv_connector.p2p_store import Answer, BlockStore, Part, There, pages_between
from pagewire.engine.kv_connector.p2p_wire import Found, Lookup
from pagewire.ipc.messages import GroupShape

REQUEST: FakeRequest = prompt(1, 41)
KEYS, END = REQUEST.block_keys(10, 4), REQUEST.partial_keys(10, 1, 4)[0]  # the first 40 positions, and all 41
WINDOWS = replace(FACTS, groups=(GroupShape("window", 9, 2), GroupShape("full", 0, 1)))
HYBRID = replace(FACTS, groups=(GroupShape("full", 0, 1), GroupShape("state", 0, 3)))
STATES = replace(FACTS, groups=(GroupShape("state", 0, 3),))
LATEST = [item_name(key, 0) for key in KEYS[7:]]  # of the window group
FULL = [item_name(key, 1) for key in KEYS]


def blocks(num: int, num_pages: int = 1) -> list[bytes]:
    return [bytes([i]) * num_pages * BLOCK_BYTES for i in range(num)]


def ask(store: BlockStore, *, is_expected: bool = False) -> Answer:
    return store.look_up(Lookup(3, DIGEST, b"".join(KEYS), 1000, REQUEST.root, is_expected))


def test_blocks_of_a_window_are_promised_with_those_of_full_attention() -> None:
    store = BlockStore(WINDOWS)
    nothing = ask(store)
    assert nothing == (Found(3, 0), Found(3, 0), False, 0, 0)
    store.expect(7, [*LATEST, *FULL])
    names = b"".join(LATEST)
    all_bytes = 16 * BLOCK_BYTES
    assert ask(store) == (Found(3, 0), Found(3, 0, names=names, num_coming=10), True, 0, all_bytes)
    store.keep(FULL, blocks(10))
    there, promised, is_coming, num_bytes, num_promised = ask(store)
    assert (there, promised) == (Found(3, 10), Found(3, 10, names=names)) and is_coming
    assert (num_bytes, num_promised) == (10 * BLOCK_BYTES, all_bytes)
    store.keep(LATEST[1:], blocks(2, 2))
    assert ask(store)[:3] == (Found(3, 10, names=b"".join(LATEST[1:])), Found(3, 10, names=names), True)
    store.give_up([7])  # the first of them was never kept
    there = Found(3, 10, names=b"".join(LATEST[1:]))
    assert ask(store) == (there, there, False, 14 * BLOCK_BYTES, 14 * BLOCK_BYTES)


def test_a_store_that_is_cleared_is_as_new() -> None:
    memory = torch.empty((16, BLOCK_BYTES), dtype=torch.uint8)
    store, state = BlockStore(HYBRID, memory), (KEYS[-1], END, 1)
    store.expect(7, [*KEYS, END, item_name(END, 1)], [state])
    store.keep([*KEYS[:4], item_name(END, 1)], [*blocks(4), *blocks(1, 3)], [state])
    store.fill(7, KEYS[4:6], BLOCK_BYTES)
    store.grow(KEYS[4:6], 0, torch.zeros((2, BLOCK_BYTES), dtype=torch.uint8))
    store.keep(KEYS[4:5], [None])
    assert len(store._free) == 16 - 4 - 3 - 2 and ask(store)[3:] == (6 * BLOCK_BYTES, 10 * BLOCK_BYTES)
    num_changes = store.num_changes
    store.clear()
    assert sorted(store._free) == list(range(16)) and store.num_changes > num_changes
    assert ask(store) == (Found(3, 0), Found(3, 0), False, 0, 0) and store.there(KEYS[4]) is None
    store.keep(KEYS[4:5], blocks(1))
    there = store.there(KEYS[4])
    assert there is not None and not there.origin


@pytest.mark.parametrize("facts", [HYBRID, STATES])
def test_a_state_is_promised_until_it_is_kept(facts: ConnectorFacts) -> None:
    store, state = BlockStore(facts), (KEYS[-1], END, 1)
    name, of_blocks = item_name(END, facts.state or 0), [*KEYS, END] if facts is HYBRID else []
    store.expect(7, [*of_blocks, name], [state])
    store.keep(of_blocks[:10], blocks(len(of_blocks[:10])))
    there, promised, is_coming, *_ = ask(store)
    beginning = END if facts is HYBRID else b""
    assert (there.states, there.names) == ((), b"") and is_coming
    assert (promised.states, promised.names) == ((state,), beginning)
    store.keep([*of_blocks[10:], name], [*blocks(len(of_blocks[10:])), bytes(3 * BLOCK_BYTES)], [state])
    assert ask(store).there == promised and not ask(store).is_coming
    store.give_up([7])
    assert ask(store).there == promised
    store.drop([name])
    assert ask(store).there.states == ()


def test_a_state_that_two_requests_compute_is_promised_until_both_have_ended() -> None:
    store, state = BlockStore(STATES), (KEYS[-1], END, 1)
    for rid in (7, 8):
        store.expect(rid, [END], [state])
    store.give_up([7])
    assert ask(store).promised.states == (state,)
    store.give_up([8])
    assert ask(store).promised.states == ()


def test_a_prompt_that_is_expected_is_waited_for_until_all_groups_have_its_end() -> None:
    windows, hybrid = BlockStore(WINDOWS), BlockStore(HYBRID)
    windows.keep(FULL, blocks(10))
    hybrid.keep(KEYS, blocks(10))
    for store in (windows, hybrid):
        assert ask(store, is_expected=True).is_coming and not ask(store).is_coming
    windows.keep(LATEST, blocks(3, 2))
    hybrid.keep([item_name(END, 1)], [bytes(3 * BLOCK_BYTES)], [(KEYS[-1], END, 1)])
    for store in (windows, hybrid):
        assert not ask(store, is_expected=True).is_coming


@pytest.mark.parametrize("has_memory", [True, False])
def test_a_pass_fills_blocks_of_several_pages(has_memory: bool) -> None:
    memory = torch.zeros(5, BLOCK_BYTES, dtype=torch.uint8) if has_memory else None
    store = BlockStore(WINDOWS, memory)
    names, size, cuts = LATEST[:2], 2 * BLOCK_BYTES, (0, 100, BLOCK_BYTES + 60, 2 * BLOCK_BYTES)
    content = torch.arange(2 * size, dtype=torch.int64).mul(37).to(torch.uint8).view(2, size)
    store.expect(7, names)
    store.fill(7, names, cuts[2], 2)
    for first, last in pairwise(cuts):
        assert store.there(names[1]) == There(first, size, 1) and not store.is_filled(names[1])
        store.grow(names, first, content[:, first:last])
        part = Part(first, last - first, 1)
        assert store.read(names, part) == content[:, first:last].contiguous().numpy().tobytes()
    assert store.there(names[1]) == There(cuts[2], size, 1) and store.is_filled(names[1])
    if memory is not None:
        at, part = memory.data_ptr() + 2 * BLOCK_BYTES, Part(100, BLOCK_BYTES, 1)
        assert store.places(names[1:], part) == ((at + 100, BLOCK_BYTES - 100), (at + BLOCK_BYTES, 100))
    store.keep(names[:1], [None])
    assert store.read(names[:1]) == content[0].numpy().tobytes() and store.read(names) is None
    store.give_up([7])
    assert store.there(names[1]) is None and store.read(names[1:], Part(0, 8, 1)) is None
    assert len(store._free) == (3 if has_memory else 0)


def test_the_bytes_of_an_item_by_page() -> None:
    assert list(pages_between(0, 300, 100)) == [(0, 0, 100), (1, 0, 100), (2, 0, 100)]
    assert list(pages_between(120, 130, 100)) == [(1, 20, 30)]
    assert list(pages_between(99, 201, 100)) == [(0, 99, 100), (1, 0, 100), (2, 0, 1)]
    assert list(pages_between(100, 100, 100)) == []
