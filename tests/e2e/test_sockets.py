"""The sockets of a server: only the API's port accepts connections."""

import socket
import stat
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from pagewire.tools.servers import Server

pytestmark = pytest.mark.e2e


def test_only_the_api_listens(start: Callable[..., Server]) -> None:
    server = start("--tensor-parallel-size", "2").wait_ready()
    processes = [psutil.Process(server.process.pid), *psutil.Process(server.process.pid).children(recursive=True)]
    assert len(processes) >= 8  # the supervisor, two ranks, core, grammar, tokenizer, detokenizer, api
    listeners, files = [], set()
    for process in processes:
        name = " ".join(process.cmdline()).removeprefix("pagewire: ").strip()
        for connection in process.net_connections("all"):
            if connection.family == socket.AF_UNIX:
                files.add(connection.laddr)
            elif connection.status == psutil.CONN_LISTEN or connection.type == socket.SOCK_DGRAM:
                listeners.append((name, connection.laddr))
    others = [(name, at) for name, at in listeners if at != ("127.0.0.1", server.port)]
    assert len(others) < len(listeners)
    # Ranks on CPUs communicate over loopback; they rendezvous through a file in the run folder.
    assert all(name.startswith("worker") and at.ip == "127.0.0.1" for name, at in others), others

    (run_folder,) = {path.parent for path in server.run_root.glob("pagewire-*/core")}
    assert stat.S_IMODE(run_folder.stat().st_mode) == 0o700
    sockets = [path for path in run_folder.iterdir() if path.is_socket()]
    assert {path.name for path in sockets} >= {"core", "worker", "worker-1", "tokenizer", "api", "supervisor"}
    assert all(stat.S_IMODE(path.stat().st_mode) & 0o077 == 0 for path in [*sockets, *run_folder.glob("launch*.json")])
    # No abstract sockets, which no folder protects, and none in other folders. Unnamed sockets are pairs.
    assert {Path(file).parent for file in files if file} == {run_folder}
    assert server.stop() == 0
