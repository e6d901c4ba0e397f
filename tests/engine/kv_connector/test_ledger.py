"""Loads under way, counts and events of a tier."""

from pagewire.engine.kv_connector.ledger import Ledger
from pagewire.ipc.messages import Transferred, ids_to_bytes

SIZE = 16


def test_a_load_ends_once_and_its_failed_blocks_are_reported() -> None:
    ledger = Ledger("host", SIZE)
    ledger.begin_load(1, [10, 11], [b"a", b"b"])
    ledger.begin_load(2, [12], [b"c"])
    ended = Transferred((1,), ids_to_bytes([11]), ())
    assert ledger.end_loads(ended) == ([b"a", b"b"], [b"b"])
    assert ledger.end_loads(ended) == ([], [])
    assert ledger.forget_loads() == [b"c"] and ledger.forget_loads() == []
    tier = ledger.snapshot(3, 9)
    assert (tier.name, tier.num_blocks) == ("host", 3)
    assert SIZE in [getattr(tier, field) for field in tier.__struct_fields__], "the tokens of one block were hit"


def test_events_keep_their_order_and_consecutive_ones_are_merged() -> None:
    ledger = Ledger("disk", SIZE)
    ledger.stored([b"a", b"b"])
    ledger.found([b"c"])
    ledger.evicted(b"a")
    ledger.removed([b"b"])
    ledger.stored([b"a"])
    events = ledger.take_events()
    assert [(event.stored, event.keys) for event in events] == [
        (True, (b"a", b"b", b"c")), (False, (b"a", b"b")), (True, (b"a",)),
    ]  # fmt: skip
    assert ledger.take_events() == []
