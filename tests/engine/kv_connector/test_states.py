"""Where the states of a tier stand."""

from pagewire.engine.core.kv_connector import Item
from pagewire.engine.kv_connector.states import StateIndex

BEHIND = bytes(32)


def test_states_are_found_behind_their_block_until_they_are_removed() -> None:
    index = StateIndex(2)
    one, two = (Item(bytes([n]) * 32, 4, BEHIND, 2, n) for n in (1, 2))
    for item in (one, two, two, one._replace(group=0), one._replace(parent=None, key=b"x" * 32)):
        index.add(item)
    assert index.behind(BEHIND) == {one.key: 1, two.key: 2}, "only the states"
    assert index.behind(one.key) == {}
    index.remove(one.name)
    index.remove(one.name)
    index.remove(one._replace(group=0).name)
    assert index.behind(BEHIND) == {two.key: 2}
    index.clear()
    assert index.behind(BEHIND) == {}


def test_a_model_without_states_has_none() -> None:
    index = StateIndex(None)
    index.add(Item(bytes([1]) * 32, 4, BEHIND, 0, 3))
    assert index.behind(BEHIND) == {}
