"""Stores of one kind: owners, order, bounds, and changes by several processes."""

import asyncio
import random
from pathlib import Path

import pytest
from harness import run

from pagewire.api.http.http_error import HttpError
from pagewire.api.state.database import Database
from pagewire.api.state.store import ENTRY_BYTES, Store

ROOM = ENTRY_BYTES + 100  # what an entry of 98 bytes takes, with an id of two letters


def test_an_entry_belongs_to_its_owner_and_kind() -> None:
    async def work() -> None:
        database = Database()
        store, other = (Store(database, kind, max_bytes=1 << 20) for kind in ("one", "other"))
        await store.put(b"a", "x", b"1")
        await store.put(b"b", "x", b"2")
        await store.put(b"a", "y", b"3")
        await store.put(b"a", "x", b"4")
        assert await store.get(b"a", "x") == b"4" and await store.get(b"b", "x") == b"2"
        assert await store.get(b"b", "y") is None and await other.get(b"a", "x") is None
        assert await store.entries(b"a") == [("y", b"3"), ("x", b"4")] and await other.entries(b"a") == []
        seen: list[tuple[bytes, str, bytes]] = []

        def look(owner: bytes, id: str, value: bytes) -> bytes | None:
            seen.append((owner, id, value))
            return {b"3": None, b"4": b"5"}.get(value, value)

        left = await store.change_all(look)
        assert seen == [(b"a", "x", b"4"), (b"b", "x", b"2"), (b"a", "y", b"3")] * 2, "first to see whether to write"
        assert left == [(b"a", "x", b"5"), (b"b", "x", b"2")]
        assert await store.entries(b"a") == [("x", b"5")] and await store.entries(b"b") == [("x", b"2")]
        assert await store.delete(b"a", "x") and not await store.delete(b"a", "x")
        assert await store.get(b"b", "x") == b"2"
        database.close()

    run(work())


def test_the_least_recently_used_leave() -> None:
    async def work() -> None:
        store = Store(Database(), "x", max_bytes=5 * ROOM)
        for i in range(10, 60):
            await store.put(b"", str(i), bytes(98))
            assert await store.num_bytes() <= 5 * ROOM
            await store.get(b"", "10")
        assert [id for id, _ in await store.entries(b"")] == ["59", "58", "57", "56", "10"]
        await store.put(b"", "57", bytes(98 + ROOM))  # takes the room of two
        assert [id for id, _ in await store.entries(b"")] == ["59", "58", "57", "10"]
        await store.put(b"", "large", bytes(6 * ROOM))
        await store.put(b"", "59", bytes(6 * ROOM))  # too large now: nothing old is left in its place
        assert [id for id, _ in await store.entries(b"")] == ["58", "57", "10"]

    run(work())


def test_where_nothing_leaves_a_full_store_refuses() -> None:
    async def work() -> None:
        store = Store(Database(), "x", max_bytes=2 * ROOM, drops_oldest=False)
        await store.put(b"", "10", bytes(98))
        await store.put(b"", "11", bytes(98))
        with pytest.raises(HttpError, match="delete some") as refused:
            await store.put(b"", "12", b"")
        assert refused.value.status == 413
        with pytest.raises(HttpError):
            await store.put(b"", "10", bytes(99))
        await store.put(b"", "10", b"less")
        assert await store.get(b"", "10") == b"less" and len(await store.entries(b"")) == 2

    run(work())


def test_the_bound_counts_exactly_what_is_stored() -> None:
    """Against a dict, over random histories."""

    async def work(seed: int) -> None:
        draw = random.Random(seed)
        store = Store(Database(), "x", max_bytes=8 * ROOM)
        model: dict[str, bytes] = {}
        for _ in range(200):
            id = draw.choice("abcdefghijklmnop")
            match draw.randrange(3):
                case 0:
                    assert await store.delete(b"", id) is (model.pop(id, None) is not None)
                case 1:
                    value = await store.get(b"", id)
                    assert value == model.get(id)
                    if value is not None:
                        model[id] = model.pop(id)
                case _:
                    value = bytes(draw.randrange(3 * ROOM))
                    await store.put(b"", id, value)
                    model.pop(id, None)
                    model[id] = value
                    while sum(len(v) + 1 + ENTRY_BYTES for v in model.values()) > 8 * ROOM:
                        model.pop(next(iter(model)))
            assert dict(await store.entries(b"")) == model, seed
            assert await store.num_bytes() == sum(len(v) + 1 + ENTRY_BYTES for v in model.values()), seed

    for seed in range(5):
        run(work(seed))


def test_changes_of_several_processes_do_not_overwrite_each_other(tmp_path: Path) -> None:
    async def work() -> None:
        stores = [Store(Database(str(tmp_path / "state")), "x", max_bytes=1 << 20) for _ in range(3)]

        def add(value: bytes | None) -> bytes:
            return b"%d" % (int(value or b"0") + 1)

        await asyncio.gather(*(store.change(b"", "n", add) for store in stores * 20))
        assert [await store.get(b"", "n") for store in stores] == [b"60"] * 3
        assert await stores[0].change(b"", "n", lambda value: None) is None
        assert await stores[1].get(b"", "n") is None

    run(work())


def test_a_change_that_raises_changes_nothing() -> None:
    async def work() -> None:
        store = Store(Database(), "x", max_bytes=1 << 20)
        await store.put(b"", "a", b"1")

        def fail(value: bytes | None) -> bytes:
            raise HttpError(400, "no")

        with pytest.raises(HttpError, match="no"):
            await store.change(b"", "a", fail)
        assert await store.get(b"", "a") == b"1"

    run(work())
