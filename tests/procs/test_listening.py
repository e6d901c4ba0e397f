"""The listening socket: its permissions, a path that exists already, and its removal."""

import os
import socket
import stat
from pathlib import Path

import pytest

from pagewire.config.config import ListenOptions
from pagewire.config.flags import make_config
from pagewire.errors import ConfigError
from pagewire.procs.listening import Listening


def config(**settings: object) -> ListenOptions:
    return make_config(**settings).listen


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)  # the paths of Unix sockets are short
    return tmp_path / "s"


def test_only_its_owner_may_connect(path: Path) -> None:
    listening = Listening(config(uds="s"))
    assert stat.S_ISSOCK(path.stat().st_mode) and stat.S_IMODE(path.stat().st_mode) == 0o600
    with socket.socket(socket.AF_UNIX) as client, pytest.raises(ConnectionRefusedError):
        client.connect(str(path))  # nothing listens yet
    listening.close()
    assert not path.exists()


def test_the_socket_of_a_killed_server_is_replaced(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    listening = Listening(config(uds=str(path)))
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    listening.close()


@pytest.mark.parametrize("listens", [True, False])
def test_the_socket_of_a_running_server_is_left_alone(path: Path, listens: bool) -> None:
    first = Listening(config(uds=str(path)))
    if listens:
        with socket.socket(fileno=os.dup(first.fd)) as api_socket:
            api_socket.listen()
    with pytest.raises(ConfigError, match=r"Cannot listen on --uds .*: Address already in use"):
        Listening(config(uds=str(path)))
    assert path.exists()
    first.close()


def test_closing_keeps_the_socket_of_a_later_server(path: Path) -> None:
    first = Listening(config(uds=str(path)))
    path.unlink()
    second = Listening(config(uds=str(path)))
    first.close()
    assert path.exists()
    second.close()


def test_other_files_are_not_touched(path: Path) -> None:
    path.write_text("precious")
    with pytest.raises(ConfigError, match="Cannot listen on --uds"):
        Listening(config(uds=str(path)))
    assert path.read_text() == "precious"


@pytest.mark.parametrize("name", ["x" * 200, "no/such/folder/s"])
def test_invalid_paths_are_refused(path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="Cannot listen on --uds"):
        Listening(config(uds=str(path.parent / name)))


def test_a_port_in_use_is_refused_and_a_free_one_is_bound(path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"Cannot listen on 127.0.0.1:{port}"):
            Listening(config(port=port))
    listening = Listening(config(port=0))
    listening.close()
