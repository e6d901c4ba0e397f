"""Which processes of a server have a key in memory: in start messages, environments, command lines or elsewhere."""

import json
import os
import secrets
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from pagewire.tools.servers import Server

pytestmark = pytest.mark.e2e


@pytest.fixture
def keys(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """The key of a user, the key of an administrator, and a token in the environment in which the server is started."""
    found = [secrets.token_hex(16) for _ in range(3)]
    monkeypatch.setenv("HF_TOKEN", found[2])
    return [key.encode() for key in found]


def writable_memory(pid: int) -> Iterator[bytes]:
    """Heap, stack (which begins with arguments and environment) and other private data of a process."""
    with open(f"/proc/{pid}/mem", "rb", buffering=0) as memory:
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
            area, mode, *_ = line.split()
            start, end = (int(text, 16) for text in area.split("-"))
            if not mode.startswith("rw"):
                continue
            for at in range(start, end, 1 << 24):
                try:
                    memory.seek(at)
                    yield memory.read(min(1 << 24, end - at) + 64)
                except OSError:
                    break  # the area was unmapped or cannot be read


def holders(server: Server, key: bytes) -> set[str]:
    """The names of the processes under the supervisor that have the key in memory."""
    found = set()
    for process in psutil.Process(server.process.pid).children(recursive=True):
        if any(key in piece for piece in writable_memory(process.pid)):
            found.add(" ".join(process.cmdline()).removeprefix("pagewire: ").strip())
    return found


@pytest.mark.skipif(not os.access("/proc/self/mem", os.R_OK), reason="reads /proc/PID/mem")
def test_only_the_api_process_has_api_keys_in_memory(keys: list[bytes], tmp_path: Path) -> None:
    user, admin, hub = keys
    (tmp_path / "admins").write_bytes(admin)
    trace = tmp_path / "trace"
    flags = ("--admin-api-key-file", str(tmp_path / "admins"), "--enable-sleep-mode", "--record-trace", str(trace))
    server = Server(tmp_path / "server", "--api-key", user.decode(), *flags)
    try:
        server.wait_ready()
        request = urllib.request.Request(
            f"{server.url}/v1/chat/completions",
            json.dumps({"messages": [{"role": "user", "content": "Count from 1 to 3"}], "max_tokens": 8}).encode(),
            {"content-type": "application/json", "authorization": f"Bearer {user.decode()}"},
        )
        with urllib.request.urlopen(request, timeout=60) as response:
            assert response.status == 200
        assert holders(server, user) == {"api"}
        assert holders(server, admin) == {"api"}
        assert holders(server, hub) == set()
        assert not any(key in file.read_bytes() for file in server.run_root.rglob("*.json") for key in keys)
    finally:
        code = server.stop()
    assert code == 0 and not any(key in trace.read_bytes() for key in keys)
