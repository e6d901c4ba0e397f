"""A server that is started once for all tests that do it no harm, and servers of a test's own."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from defaults import DEFAULTS, machine
from servers import Server


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One server with the demo model for all tests that do it no harm."""
    server = Server(tmp_path_factory.mktemp("server")).wait_ready()
    yield server
    assert server.stop() == 0, server.log.read_text()


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

    def start_one(*flags: str, **more: object) -> Server:
        server = Server(tmp_path / f"run{len(servers)}", *flags, **more)  # type: ignore[arg-type]
        servers.append(server)
        return server

    yield start_one
    for server in servers:
        if server.process.poll() is None:
            server.process.kill()
        server.stop()
