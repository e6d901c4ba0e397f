"""Starts, inspects and stops real servers for tests, benchmarks and stress programs.

A `Server` is any program that listens on a `--port`. Inside its `with` block it is ready; it must end with exit code 0:

    with Server(folder, "--max-num-seqs", "4") as server:
        server.get("/v1/models")
"""

import json
import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import NamedTuple, Self

import psutil

ROOT = Path(__file__).resolve().parents[1]
HOST = "127.0.0.1"
MB = 1 << 20
PAGEWIRE = (sys.executable, "-m", "pagewire")
SERVE = (*PAGEWIRE, "serve", "--threads", "1")
ROUTE = (*PAGEWIRE, "route")
START_TIMEOUT_S = 120.0
_STOP_TIMEOUT_S = 120.0  # from SIGTERM to SIGKILL, more than the default --drain-timeout
_LEFT_S = 30.0  # how long descendants may outlive the first process
_DEATH_S = 30.0  # from SIGKILL to the end of a process
_POLL_S = 0.02
_TAIL = 2000  # characters of its log that an error quotes


class ServerError(Exception):
    """A server did not start, or did not end as it should. Quotes the end of its log."""


class Holding(NamedTuple):
    """The resources of a process."""

    num_bytes: int  # of memory that it shares with no other process
    num_fds: int
    num_threads: int


def holding(process: psutil.Process) -> Holding:
    """The resources that a process holds now. Raises psutil.Error if it has ended."""
    with process.oneshot():
        return Holding(process.memory_full_info().uss, process.num_fds(), process.num_threads())


class Server:
    """Runs `command` with a free port and `flags`.

    `folder`: holds its log, and is its working folder unless `cwd` is given; None: a temporary folder holds the log,
    and the working folder is the caller's.
    """

    def __init__(
        self,
        folder: Path | None = None,
        *flags: str,
        command: Sequence[str] = SERVE,
        environment: Mapping[str, str] | None = None,
        cwd: Path | None = None,
    ) -> None:
        self.port = free_port()
        self.url = f"http://{HOST}:{self.port}"
        self.run_root = Path(tempfile.mkdtemp(prefix="pw-"))  # parent of its run folder; sockets need short paths
        self.log = (folder or self.run_root) / "log"
        self.log.parent.mkdir(parents=True, exist_ok=True)
        self.log.write_bytes(b"")
        self._command = [*command, "--port", str(self.port), *flags]
        self._cwd = cwd or folder
        self._environment = os.environ | {"XDG_RUNTIME_DIR": str(self.run_root)} | dict(environment or {})
        self._environment.pop("PAGEWIRE_API_KEY", None)
        self.start()

    def start(self) -> Self:
        """Starts the process; after `kill` again, with the same port and log."""
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                self._command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=self._environment, cwd=self._cwd
            )
        return self

    def wait_ready(self, path: str = "/ready", timeout_s: float = START_TIMEOUT_S) -> Self:
        """Returns when `path` answers 200. Raises ServerError if the server ends or takes too long."""
        deadline = time.monotonic() + timeout_s
        while not self.answers(path):
            if (code := self.process.poll()) is not None:
                raise ServerError(f"it ended with exit code {code}; {log_tail(self.log)}")
            if time.monotonic() > deadline:
                raise ServerError(f"it was not ready within {timeout_s:g} s; {log_tail(self.log)}")
            time.sleep(_POLL_S)
        return self

    def announced(self) -> str:
        """The log, once the launch has announced itself there, which it does just after it is ready."""
        deadline = time.monotonic() + START_TIMEOUT_S
        while "listening on" not in (said := self.log.read_text()):
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise ServerError(f"it announced nothing; {log_tail(self.log)}")
            time.sleep(_POLL_S)
        return said

    def stop(self) -> int:
        """Sends SIGTERM and returns the exit code; may be called again. Raises ServerError if descendants outlived the
        first process."""
        self._end(must_be_zero=False)
        return int(self.process.returncode)

    def _end(self, *, must_be_zero: bool) -> None:
        left = end(self.process)
        code = self.process.returncode
        wrong = f"it left {left} behind" if left else f"it ended with exit code {code}" if must_be_zero and code else ""
        said = log_tail(self.log)
        shutil.rmtree(self.run_root, ignore_errors=True)
        if wrong:
            raise ServerError(f"{wrong}; {said}")

    def kill(self) -> None:
        """Sends SIGKILL to all of its processes."""
        those = descendants(self.process, itself=True)
        for process in those:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        self.process.wait()
        _left_of(those, _DEATH_S)

    def close(self) -> None:
        """Kills it and removes its files."""
        self.kill()
        shutil.rmtree(self.run_root, ignore_errors=True)

    def __enter__(self) -> Self:
        try:
            return self.wait_ready()
        except BaseException:
            self.close()
            raise

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            self._end(must_be_zero=True)
        except ServerError:
            if kind is None:  # otherwise it would hide the exception of the block
                raise

    # ── its answers ──────────────────────────────────────────────────────────────────────────────────────────────────

    def answers(self, path: str, timeout_s: float = 5.0) -> bool:
        """Whether a GET has status 200."""
        try:
            with urllib.request.urlopen(self.url + path, timeout=timeout_s) as response:
                return bool(response.status == 200)
        except OSError:
            return False

    def get(self, path: str) -> str:
        """The body of a GET. Raises OSError for any other status than 200."""
        with urllib.request.urlopen(self.url + path, timeout=60) as response:
            return str(response.read().decode())

    def metrics(self) -> dict[str, float]:
        """The samples of /metrics: name → sum over all labels."""
        found: dict[str, float] = {}
        for line in self.get("/metrics").splitlines():
            if not line.startswith("#"):
                sample, _, value = line.rpartition(" ")
                name = sample.partition("{")[0]
                found[name] = found.get(name, 0.0) + float(value)
        return found

    def metric(self, name: str) -> float:
        """One sample of `metrics`; 0 if there is none of that name."""
        return self.metrics().get(name, 0.0)

    def load(self) -> dict[str, float]:
        """/load: rows, queue and KV memory, by the core's last snapshot."""
        found = json.loads(self.get("/load"))
        return {name: found[name] for name in ("server_load", "num_running", "num_waiting", "kv_cache_usage")}

    def wait_idle(self, timeout_s: float = 60.0) -> None:
        """Returns when no request runs or waits and no KV is in use."""
        wait_until(lambda: not any(self.load().values()), "the server is idle", timeout_s)

    # ── its processes ────────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def supervisor(self) -> psutil.Process:
        return psutil.Process(self.process.pid)

    def children(self) -> dict[str, psutil.Process]:
        """Actor → process."""
        found = _named_children(self.supervisor)
        templates = [name for name in found if name.split(" ")[0] == "template"]
        for template in [found.pop(name) for name in templates]:
            found |= _named_children(template)
        return found

    def of_kind(self, kind: str) -> list[psutil.Process]:
        """The actors of a kind, such as `worker` and `worker-1`, in order."""
        children = self.children()
        return [children[name] for name in sorted(children) if name == kind or name.startswith(f"{kind}-")]

    def holdings(self) -> dict[str, Holding]:
        """The resources of the supervisor and of each of its children."""
        return {name: holding(process) for name, process in {"supervisor": self.supervisor, **self.children()}.items()}

    def num_bytes(self) -> int:
        """The memory of the supervisor and its children."""
        return sum(held.num_bytes for held in self.holdings().values())


def _named_children(process: psutil.Process) -> dict[str, psutil.Process]:
    found = {}
    with suppress(psutil.NoSuchProcess):
        for child in process.children():
            with suppress(psutil.NoSuchProcess):
                name = " ".join(child.cmdline()).removeprefix("pagewire: ").strip()
                found[f"{name} {child.pid}" if name in found else name] = child  # each engine has a template
    return found


# ── processes ────────────────────────────────────────────────────────────────────────────────────────────────────────


def descendants(process: "subprocess.Popen[bytes]", *, itself: bool = False) -> list[psutil.Process]:
    """All descendants. Empty when the process has ended, because orphans cannot be found."""
    if process.poll() is not None:
        return []
    root = psutil.Process(process.pid)
    return [*([root] if itself else []), *root.children(recursive=True)]


def end(
    process: "subprocess.Popen[bytes]",
    others: Iterable[psutil.Process] = (),
    timeout_s: float = _STOP_TIMEOUT_S,
    left_s: float | None = None,
) -> list[psutil.Process]:
    """Sends SIGTERM to a process, then SIGKILL, by pid, to the process, its descendants and `others` that are left.

    `left_s`: how long these may outlive the process; None: `_LEFT_S`. Returns those of them that had to be killed."""
    those = {*others, *descendants(process)}
    process.terminate()  # does nothing if it has ended
    with suppress(subprocess.TimeoutExpired):
        process.wait(timeout_s)
    process.kill()
    process.wait()
    left = _left_of(those, _LEFT_S if left_s is None else left_s)
    for one in left:
        with suppress(psutil.Error):
            one.kill()  # psutil refuses if another process has the pid by now
    _left_of(left, _DEATH_S)
    return left


def _left_of(processes: Iterable[psutil.Process], limit_s: float) -> list[psutil.Process]:
    """The processes that are alive after `limit_s`."""
    left, deadline = list(processes), time.monotonic() + limit_s
    while (left := [process for process in left if is_alive(process)]) and time.monotonic() < deadline:
        time.sleep(_POLL_S)
    return left


def is_alive(process: psutil.Process) -> bool:
    """Whether it has not ended; a zombie has."""
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def log_tail(log: Path) -> str:
    """The path and the end of a log, for an error message."""
    text = log.read_text(errors="replace").strip() if log.exists() else ""
    return f"its log is {log}" + (f" and ends:\n{text[-_TAIL:]}" if text else ", and empty")


# ── ports and waiting ────────────────────────────────────────────────────────────────────────────────────────────────


_given: set[int] = set()  # ports, by this process


def free_port(num: int = 1) -> int:
    """A free port, the first of `num` that follow each other, below the range of ports for outgoing connections: such a
    connection of another test could take the port before the server does. None is given twice, and each worker of
    pytest-xdist has ports of its own, because a server may bind its port much later."""
    num_workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:]) % num_workers  # one that is replaced counts on
    width = 15_000 // num_workers
    if len(_given) > width // 2:
        _given.clear()
    while True:
        port = 15_000 + worker * width + secrets.randbelow(width - num)
        ports = range(port, port + num)
        if _given.isdisjoint(ports):
            with ExitStack() as stack, suppress(OSError):
                for each in ports:
                    stack.enter_context(socket.socket()).bind((HOST, each))
                _given.update(ports)
                return port


def wait_until(condition: Callable[[], bool], what: str, timeout_s: float = 10.0) -> None:
    """Returns when the condition is true. Raises AssertionError with `what` after `timeout_s`."""
    deadline, is_late = time.monotonic() + timeout_s, False
    while not condition():
        assert not is_late, f"not within {timeout_s} s: {what}"
        is_late = time.monotonic() > deadline  # checked once more, because this process may not have run meanwhile
        time.sleep(_POLL_S)
