"""Contents in pieces: order, owners, bounds of memory and of the database."""

import pytest
from harness import run

from pagewire.api.http.http_error import HttpError
from pagewire.api.state import pieces
from pagewire.api.state.database import Database
from pagewire.api.state.pieces import Pieces


async def read(contents: Pieces, owner: bytes, id: str, first: int = 0) -> list[tuple[int, bytes]]:
    return [piece async for piece in contents.read(owner, id, first)]


def test_pieces_come_in_the_order_of_their_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces, "_READ_BYTES", 10)  # several reads

    async def work() -> None:
        contents = Pieces(Database(), "x", max_bytes=1 << 20)
        for number in (100, 3, 20, 0):
            await contents.put(b"a", "id", number, b"%d" % number * 5)
        await contents.put(b"a", "id", 3, b"again")
        await contents.put(b"a", "ie", 1, b"neighbour")
        await contents.put(b"b", "id", 1, b"of another owner")
        assert await read(contents, b"a", "id") == [(0, b"00000"), (3, b"again"), (20, b"20" * 5), (100, b"100" * 5)]
        assert await read(contents, b"a", "id", 4) == [(20, b"20" * 5), (100, b"100" * 5)]
        await contents.delete(b"a", "id")
        assert await read(contents, b"a", "id") == [] and await read(contents, b"c", "id") == []
        assert len(await read(contents, b"a", "ie")) == len(await read(contents, b"b", "id")) == 1

    run(work())


def test_a_full_database_refuses_and_deleting_makes_room() -> None:
    async def work() -> None:
        contents = Pieces(Database(), "x", max_bytes=3000)
        await contents.put(b"", "a", 0, bytes(1000))
        with pytest.raises(HttpError) as refused:
            await contents.put(b"", "b", 0, bytes(2000))
        assert refused.value.status == 413
        await contents.delete(b"", "a")
        assert await contents.num_bytes() == 0
        await contents.put(b"", "b", 0, bytes(2000))
        assert await read(contents, b"", "b") == [(0, bytes(2000))]

    run(work())
