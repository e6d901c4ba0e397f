"""A server that is started once for all tests that do it no harm, and servers of a test's own."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from defaults import DEFAULTS, machine

from pagewire.tools.servers import SERVE, Server


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One server with the demo model for all tests that do it no harm."""
    with Server(tmp_path_factory.mktemp("server")) as server:
        yield server


@pytest.fixture(scope="module", params=DEFAULTS)
def default(request: pytest.FixtureRequest) -> str:
    """The name of each of the defaults that a user can get; `defaults.machine` gives them to processes."""
    name: str = request.param
    return name


@pytest.fixture
def on_default(default: str) -> Iterator[str]:
    """The name of each default; processes that the test starts get it."""
    with machine(default):
        yield default


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Server]]:
    """Starts servers that end with the test."""
    servers: list[Server] = []

    def start_one(*flags: str, command: Sequence[str] = SERVE) -> Server:
        servers.append(Server(tmp_path / f"run{len(servers)}", *flags, command=command))
        return servers[-1]

    yield start_one
    for server in servers:
        server.close()
