"""Keys, addresses and folders, which only socket channels have."""

import stat
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import pytest

from pagewire.errors import ConfigError
from pagewire.ipc.epochs import Epochs, Link
from pagewire.ipc.messages import Hidden, Ping, Reset, Stop, ToTokenizer, ToWorker
from pagewire.ipc.zmq_channel import (
    Keys,
    ZmqContext,
    ZmqInbox,
    check_address,
    make_run_folder,
    read_keys,
    remove_run_folder,
)
from pagewire.tools.servers import free_port

from .test_channel import receive


@pytest.fixture
def short_path() -> Iterator[Path]:
    """A folder with a path short enough for a Unix socket; that of `tmp_path` may be too long."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        yield Path(folder)


def test_a_sender_may_start_first(tmp_path: Path) -> None:
    context = ZmqContext()
    address = f"ipc://{tmp_path}/late"
    outbox = context.outbox(address)
    outbox.send(Ping())
    inbox: ZmqInbox[object] = context.inbox(address, ToTokenizer)
    assert receive(inbox, 1) == [Ping()]
    inbox.close()
    context.close()


def test_messages_from_a_peer_without_the_key_are_not_received(tmp_path: Path) -> None:
    ours, theirs = ZmqContext(read_keys(tmp_path / "ours")), ZmqContext(read_keys(tmp_path / "theirs"))
    address = f"tcp://127.0.0.1:{free_port()}"
    inbox: ZmqInbox[object] = ours.inbox(address, ToTokenizer)
    theirs.outbox(address).send(Ping())
    ours.outbox(address).send(Stop(0.0, "from a friend"))
    assert receive(inbox, 1) == [Stop(0.0, "from a friend")] and not inbox.wait(0.2)
    inbox.close()
    ours.close()
    theirs.close()


def test_the_data_of_a_pass_is_a_frame_of_its_own(tmp_path: Path) -> None:
    """Also of a message that waits for its epoch, and nothing is left of one that is stale."""
    ours, theirs = Epochs(), Epochs()
    receiver, sender = ZmqContext(epochs=ours), ZmqContext(epochs=theirs)
    inbox: ZmqInbox[object] = receiver.inbox(f"ipc://{tmp_path}/worker", ToWorker)
    outbox = sender.outbox(f"ipc://{tmp_path}/worker", Link.DEVICE)
    control = receiver.outbox(f"ipc://{tmp_path}/worker", Link.CONTROL)
    first, bare = Hidden(1, width=2, data=b"12345678"), Hidden(2, fault="out_of_memory")
    for message in (first, bare, first):
        outbox.send(message)
    assert receive(inbox, 3) == [first, bare, first]
    theirs.advance(Reset(2, 2, ("worker",), ""))
    outbox.send(first)
    outbox.send(Ping())
    assert inbox.wait(30.0) and inbox.drain() == []
    reset = Reset(2, 2, ("worker",), "")
    control.send(reset)
    assert receive(inbox, 3) == [reset, first, Ping()]
    ours.advance(Reset(3, 3, ("worker",), ""))
    for message in (first, bare):
        outbox.send(message)
    theirs.advance(Reset(3, 3, ("worker",), ""))
    outbox.send(bare)
    assert receive(inbox, 1) == [bare] and ours.num_stale == 2
    receiver.close()
    sender.close()


def test_a_runtime_folder_whose_path_is_too_long_is_not_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    deep = tmp_path / ("x" * 100)
    deep.mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(deep))
    folder = make_run_folder()
    assert deep not in folder.parents
    remove_run_folder(folder)


def test_the_run_folder_is_private_and_removed(monkeypatch: pytest.MonkeyPatch, short_path: Path) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(short_path))
    left_behind = short_path / "pagewire-999999999-x"
    left_behind.mkdir()
    (left_behind / "core").touch()
    folder = make_run_folder()
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700 and not left_behind.exists()
    context = ZmqContext()
    inbox: ZmqInbox[object] = context.inbox(f"ipc://{folder}/core", ToTokenizer)
    assert stat.S_IMODE((folder / "core").stat().st_mode) & 0o077 == 0
    inbox.close()
    context.close()
    remove_run_folder(folder)
    assert not folder.exists()


@pytest.mark.parametrize("address", ["http://127.0.0.1:1", "tcp://127.0.0.1", "nonsense", "ipc://" + "x" * 108])
def test_an_invalid_address_is_refused(address: str) -> None:
    with pytest.raises(ConfigError):
        check_address(address, None)


def test_an_address_reachable_from_outside_needs_a_key_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--key-file"):
        check_address("tcp://0.0.0.0:5555", None)
    path = tmp_path / "key"
    check_address("tcp://0.0.0.0:5555", read_keys(path))
    assert read_keys(path) == read_keys(path)
    path.chmod(0o644)
    with pytest.raises(ConfigError, match="chmod 600"):
        read_keys(path)


def test_processes_that_start_at_once_have_the_same_keys(tmp_path: Path) -> None:
    """The first one creates the file; none reads a part of it."""
    with ThreadPoolExecutor(8) as pool:
        for i in range(20):
            path, start = tmp_path / str(i), Barrier(8)

            def read(path: Path = path, start: Barrier = start) -> Keys:
                start.wait()
                return read_keys(path)

            assert len(set(pool.map(lambda _, read=read: read(), range(8)))) == 1
    assert {path.name for path in tmp_path.iterdir()} == {str(i) for i in range(20)}, "nothing else is left"
    assert all(stat.S_IMODE(path.stat().st_mode) == 0o600 for path in tmp_path.iterdir())
