"""The database: shared by processes, kept over restarts, and one error each for what goes wrong with its file."""

import os
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest
from harness import run

from pagewire.api.http.http_error import HttpError
from pagewire.api.state.database import Database
from pagewire.api.state.store import Store


def store_in(path: Path) -> Store:
    return Store(Database(str(path)), "x", max_bytes=1 << 20)


def refusal(store: Store) -> str:
    with pytest.raises(HttpError) as refused:
        run(store.put(b"", "a", bytes(20_000)))
    assert refused.value.status == 503 and refused.value.code == "state_unavailable"
    return str(refused.value)


def test_a_file_is_read_by_a_later_process_and_by_its_user_only(tmp_path: Path) -> None:
    path = tmp_path / "state"
    program = (
        "import asyncio, os, sys\n"
        "from pagewire.api.state.database import Database\n"
        "from pagewire.api.state.store import Store\n"
        "asyncio.run(Store(Database(sys.argv[1]), 'x', max_bytes=9999).put(b'me', 'a', b'kept'))\n"
        "os._exit(0)\n"  # as if killed
    )
    subprocess.run([sys.executable, "-c", program, str(path)], check=True)
    assert run(store_in(path).get(b"me", "a")) == b"kept"
    assert {file.stat().st_mode & 0o777 for file in tmp_path.iterdir()} == {0o600}


def test_processes_that_start_together_make_one_database(tmp_path: Path) -> None:
    path = tmp_path / "state"
    program = (
        "import asyncio, sys\n"
        "from pagewire.api.state.database import Database\n"
        "from pagewire.api.state.store import Store\n"
        "sys.stdin.read()\n"
        "asyncio.run(Store(Database(sys.argv[1]), 'x', max_bytes=9999).put(b'', sys.argv[2], b''))\n"
    )
    started = [
        subprocess.Popen([sys.executable, "-c", program, str(path), str(i)], stdin=subprocess.PIPE) for i in range(4)
    ]
    for process in started:
        assert process.stdin is not None
        process.stdin.close()
    assert [process.wait(60) for process in started] == [0] * 4
    assert {id for id, _ in run(store_in(path).entries(b""))} == {"0", "1", "2", "3"}


def test_a_foreign_file_is_left_as_it_is(tmp_path: Path) -> None:
    notes, other = tmp_path / "notes.txt", tmp_path / "other.db"
    notes.write_text("My notes.\n" * 1000)
    assert "damaged" in refusal(store_in(notes)) and notes.read_text() == "My notes.\n" * 1000
    with sqlite3.connect(other) as connection:
        connection.execute("CREATE TABLE theirs (x)")
    connection.close()
    assert "not one of this version" in refusal(store_in(other))


def test_a_damaged_file_costs_an_error_until_it_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "state"
    store = store_in(path)
    for i in range(50):
        run(store.put(b"", str(i), bytes(4000)))
    store._database.close()
    whole = path.read_bytes()
    path.write_bytes(whole[:4096] + b"\xff" * (len(whole) - 4096))
    store = store_in(path)
    assert "damaged" in refusal(store)
    path.write_bytes(whole)
    assert run(store.get(b"", "7")) == bytes(4000)


def test_a_full_file_refuses_and_still_gives(tmp_path: Path) -> None:
    store = store_in(tmp_path / "state")
    run(store.put(b"", "b", b"kept"))
    database = store._database
    run(database.run(lambda connection: connection.execute("PRAGMA user_version").fetchone()))
    (connection,) = database._opened
    connection.execute("PRAGMA max_page_count = 1")  # of this connection: SQLite's own way of having no room
    assert "full" in refusal(store)
    assert run(store.get(b"", "b")) == b"kept"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_without_permission_is_one_error(tmp_path: Path) -> None:
    (tmp_path / "state").touch(mode=0o000)
    assert "cannot be used" in refusal(store_in(tmp_path / "state"))


def test_who_only_reads_waits_for_nobody(tmp_path: Path) -> None:
    path = tmp_path / "state"
    store = store_in(path)
    run(store.put(b"", "a", b"kept"))
    with sqlite3.connect(path, isolation_level=None) as writer:
        writer.execute("BEGIN IMMEDIATE")
        assert run(store.entries(b"")) == [("a", b"kept")]
        run(store.change_all(lambda owner, id, value: value))
        writer.execute("ROLLBACK")
    writer.close()


def test_a_folder_in_place_of_the_file_is_one_error(tmp_path: Path) -> None:
    assert "cannot be used" in refusal(store_in(tmp_path))
