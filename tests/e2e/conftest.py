"""One server that is shared by the tests that leave it unchanged, and servers for single tests."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import pytest
from defaults import DEFAULTS, machine

from pagewire.tools.servers import SERVE, Server


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server with the demo model, shared by all tests that leave it running and unchanged."""
    with Server(tmp_path_factory.mktemp("server")) as server:
        yield server


@pytest.fixture(scope="module")
def scripted_server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server that answers by the `SCRIPT` of the test's module."""
    folder = tmp_path_factory.mktemp("scripted")
    (folder / "script.json").write_text(json.dumps(request.module.SCRIPT))
    with Server(folder, "--scripted", str(folder / "script.json"), "--max-model-len", "128k") as server:
        yield server


@pytest.fixture(scope="module", params=DEFAULTS)
def default(request: pytest.FixtureRequest) -> str:
    """The name of one default configuration that a user can get; `defaults.machine` applies it to processes."""
    name: str = request.param
    return name


@pytest.fixture
def on_default(default: str) -> Iterator[str]:
    """Like `default`, and applied to the processes that the test starts."""
    with machine(default):
        yield default


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Server]]:
    """Starts servers, which are closed after the test."""
    servers: list[Server] = []

    def start_one(*flags: str, command: Sequence[str] = SERVE, environment: Mapping[str, str] = {}) -> Server:
        folder = tmp_path / f"run{len(servers)}"
        servers.append(Server(folder, *flags, command=command, environment=environment))
        return servers[-1]

    yield start_one
    for server in servers:
        server.close()
