"""Loads under way, counts and events of a tier."""

from pagewire.engine.core.kv_connector import Held, Item
from pagewire.engine.kv_connector.base import ConnectorFacts
from pagewire.engine.kv_connector.ledger import Ledger
from pagewire.ipc.messages import Transferred, ids_to_bytes

SIZE = 16
FACTS = ConnectorFacts(block_size=SIZE, block_bytes=100, model_key=bytes(32), rank_bytes=(100, 60))


def test_a_load_ends_once_and_its_failed_blocks_are_reported() -> None:
    ledger = Ledger("host", FACTS)
    a, b, c = (Item(key, 0) for key in (b"a", b"b", b"c"))
    ledger.begin_load(1, [Held(a, (10,)), Held(b, (11,))])
    ledger.begin_load(2, [Held(c, (12,))])
    ended = Transferred((1,), ids_to_bytes([11]), ())
    assert ledger.end_loads(ended) == ([a, b], [b])
    assert ledger.end_loads(ended) == ([], [])
    assert ledger.forget_loads() == [c] and ledger.forget_loads() == []
    tier = ledger.snapshot(3, 9)
    assert (tier.name, tier.num_blocks) == ("host", 3)
    assert SIZE in [getattr(tier, field) for field in tier.__struct_fields__], "the tokens of one block were hit"
    assert tier.num_loaded_bytes == 160, "on both ranks"


def test_events_keep_their_order_and_consecutive_ones_are_merged() -> None:
    ledger = Ledger("disk", FACTS)
    a, b, c = (Item(key, 0) for key in (b"a", b"b", b"c"))
    ledger.stored([a, b])
    ledger.found([c])
    ledger.evicted(a)
    ledger.removed([b])
    ledger.stored([a])
    events = ledger.take_events()
    assert [(event.stored, event.keys) for event in events] == [
        (True, (b"a", b"b", b"c")), (False, (b"a", b"b")), (True, (b"a",)),
    ]  # fmt: skip
    assert ledger.take_events() == []
