"""Real server processes for the end-to-end tests."""

import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import urllib.request
from contextlib import suppress
from pathlib import Path

import psutil
from waiting import until

ROOT = Path(__file__).resolve().parents[1]
START_TIMEOUT_S = 90.0


class Server:
    """A `pagewire serve` of our own."""

    def __init__(self, folder: Path, *flags: str, command: tuple[str, ...] = ("-m", "pagewire", "serve")) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.run_root = Path(tempfile.mkdtemp(prefix="pw-"))  # where its run folder is made: sockets need short paths
        self.log = folder / "log"
        environment = os.environ | {"XDG_RUNTIME_DIR": str(self.run_root)}
        environment.pop("PAGEWIRE_API_KEY", None)
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, *command, "--port", str(self.port), "--threads", "1", *flags],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment,
                cwd=folder,
            )

    def wait_ready(self) -> "Server":
        until(lambda: self.process.poll() is not None or self.healthy(), self.log.read_text, START_TIMEOUT_S)
        assert self.process.poll() is None, self.log.read_text()
        return self

    def healthy(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=5) as response:
                return bool(response.status == 200)
        except OSError:
            return False

    def get(self, path: str) -> str:
        with urllib.request.urlopen(self.url + path, timeout=10) as response:
            return str(response.read().decode())

    def metric(self, name: str) -> float:
        """The sum over all labels of a metric."""
        lines = [line for line in self.get("/metrics").splitlines() if line.startswith((name + "{", name + " "))]
        return sum(float(line.rpartition(" ")[2]) for line in lines)

    def children(self) -> dict[str, psutil.Process]:
        """Actor → process."""
        found = {}
        for process in psutil.Process(self.process.pid).children():
            found[" ".join(process.cmdline()).removeprefix("pagewire: ").strip()] = process
        return found

    def stop(self) -> int:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        code = self.process.wait(30)
        shutil.rmtree(self.run_root, ignore_errors=True)
        return code


def free_port() -> int:
    """Below the range from which systems take ports for outgoing connections: one of these, made by a test that runs
    beside this one, could take the port before the server does."""
    while True:
        port = 15_000 + secrets.randbelow(15_000)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
