"""A real Redis or Valkey server on a Unix socket. Tests that need one are skipped where none is installed."""

import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

import pytest
from waiting import until

PROGRAM = shutil.which("redis-server") or shutil.which("valkey-server")
IS_MISSING = PROGRAM is None or find_spec("redis") is None
needs_redis = pytest.mark.skipif(IS_MISSING, reason="needs redis-server or valkey-server, and the extra `redis`")


class RedisServer:
    """`url` is its address for `--kv-connector redis`."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "redis.sock"
        self.url = f"unix://{self.path}"
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, *options: str) -> None:
        """It is empty, and answers when this returns."""
        assert PROGRAM is not None
        fixed = ["--port", "0", "--unixsocket", str(self.path), "--save", "", "--appendonly", "no", "--dir"]
        command = [PROGRAM, *fixed, str(self._folder), *options]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        until(self._answers, "the server answers", 60.0)

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def freeze(self) -> None:
        """It keeps its connections and answers nothing."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def call(self, *command: str | bytes | int) -> object:
        """Sends one command and returns the answer."""
        import redis
        from redis.backoff import NoBackoff
        from redis.retry import Retry

        client = redis.Redis(
            unix_socket_path=str(self.path), protocol=2, retry=Retry(NoBackoff(), 0), socket_timeout=60
        )
        try:
            answer: object = client.execute_command(*command)
            return answer
        finally:
            client.close()

    def names(self, pattern: str = "*") -> list[bytes]:
        """The keys of items, without those of the index and of states."""
        found = self.call("KEYS", pattern)
        assert isinstance(found, list)
        return sorted(name for name in found if not name.endswith(b":index") and b":behind:" not in name)

    def _answers(self) -> bool:
        import redis

        try:
            return self.call("PING") is not None
        except redis.AuthenticationError:
            return True
        except redis.RedisError:
            return False


@contextmanager
def redis_server(*options: str) -> Iterator[RedisServer]:
    """A started server, which ends with the block."""
    folder = Path(tempfile.mkdtemp(prefix="pw-"))  # sockets need short paths
    server = RedisServer(folder)
    try:
        server.start(*options)
        yield server
    finally:
        server.kill()
        shutil.rmtree(folder)
