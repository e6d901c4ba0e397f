"""Records of one type in a store."""

from harness import run
from msgspec import Struct
from msgspec.structs import replace

from pagewire.api.state.database import Database
from pagewire.api.state.records import Records


class Note(Struct, frozen=True):
    text: str
    number: int = 0


def test_records_are_kept_by_owner_and_id() -> None:
    async def work() -> None:
        notes = Records(Database(), "note", Note, max_bytes=10_000)
        await notes.put(b"a", "1", Note("one"))
        await notes.put(b"a", "2", Note("two"))
        await notes.put(b"b", "1", Note("other"))
        assert await notes.get(b"a", "1") == Note("one") and await notes.get(b"c", "1") is None
        assert await notes.list(b"a") == [("2", Note("two")), ("1", Note("one"))]
        assert await notes.list(b"a", b"tw") == [("2", Note("two"))]
        changed = await notes.change(b"a", "1", lambda note: replace(note, number=5))
        assert changed == Note("one", 5) == await notes.get(b"a", "1")
        assert await notes.change(b"a", "9", lambda note: note) is None
        assert await notes.delete(b"a", "1") and not await notes.delete(b"a", "1")

    run(work())


def test_the_least_recently_used_leave() -> None:
    async def work() -> None:
        notes = Records(Database(), "note", Note, max_bytes=5_000)
        for i in range(20):
            await notes.put(b"", str(i), Note("x" * 1000))
            await notes.get(b"", "0")
        assert sorted(id for id, _ in await notes.list(b"")) == ["0", "18", "19"]

    run(work())
