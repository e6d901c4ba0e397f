"""A Ray cluster on addresses of this machine: a head and nodes that join, each with processes that a test can kill."""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil
from hidden_folder import hiding
from waiting import until

from pagewire.tools.servers import descendants, free_port

START_S = 120.0  # for a node
_COMMON = ("--min-worker-port=0", "--max-worker-port=0", "--dashboard-agent-listen-port=0", "--block")
_DETECTION = {  # how fast the head notices that a node is lost
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "2000",
    "RAY_health_check_failure_threshold": "3",
    "RAY_USAGE_STATS_ENABLED": "0",
}


def has_ray() -> bool:
    """Asks for the distribution: with the root of this package on the path, a module `ray` is found in any case."""
    try:
        return bool(version("ray"))
    except PackageNotFoundError:
        return False


class RayNodes:
    """Nodes by the last number of their address, 127.0.0.N. The head is 2 and has no CPUs of its own."""

    def __init__(self, **environment: str) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="ray-"))  # Ray's sockets need short paths
        self.address = f"127.0.0.2:{free_port()}"
        self.environment = os.environ | {"RAY_ADDRESS": self.address, **_DETECTION, **environment}
        self._nodes: dict[int, subprocess.Popen[bytes]] = {}
        self.start_head()

    def start_head(self) -> None:
        """Again, after it was killed: of a new cluster at the same address."""
        head = ("--head", f"--port={self.address.partition(':')[2]}", "--include-dashboard=false")
        self._start(2, *head, f"--temp-dir={self.folder}", "--num-cpus=0")

    def add(
        self,
        number: int,
        num_cpus: int = 1,
        *,
        hidden: Path | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """Starts a node, and waits until it has joined. `hidden`: a folder that is empty for it. `environment`: more
        variables of its programs."""
        flags = f"--address={self.address}", f"--num-cpus={num_cpus}"
        self._start(number, *flags, hidden=hidden, environment=environment or {})

    def only(self, *numbers: int) -> None:
        """Ends all other nodes but the head."""
        for number in self.numbers[1:]:
            if number not in numbers:
                self.kill(number)

    def _start(
        self, number: int, *flags: str, hidden: Path | None = None, environment: Mapping[str, str] | None = None
    ) -> None:
        ray = Path(sys.executable).with_name("ray")
        log = self.folder / f"node-{number}.log"
        before = () if hidden is None else hiding(hidden)
        memory = "--object-store-memory=80000000"
        with log.open("wb") as out:
            self._nodes[number] = subprocess.Popen(
                [*before, ray, "start", f"--node-ip-address=127.0.0.{number}", memory, *_COMMON, *flags],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                env=self.environment | dict(environment or {}),
                cwd=self.folder,
                start_new_session=True,
            )

        def has_started() -> bool:
            assert self._nodes[number].poll() is None, log.read_text()[-2000:]
            return "block forever" in log.read_text()

        until(has_started, f"node {number} runs", START_S)

    @property
    def numbers(self) -> list[int]:
        return list(self._nodes)

    def processes(self, number: int) -> list[psutil.Process]:
        """The node's, with all that run on it."""
        return descendants(self._nodes[number], itself=True)

    def kill(self, number: int) -> None:
        """Ends it without a word, like a machine that loses power."""
        for process in self.processes(number):
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue
        self._nodes.pop(number).wait()

    def drain(self, number: int) -> None:
        """Has it end as a node does that a service manager stops: it says so, and its programs have a while."""
        self._nodes[number].send_signal(signal.SIGTERM)

    def ask(self, expression: str) -> Any:
        """The JSON value of an expression of `ray`, in another process."""
        code = (
            "import json, ray; ray.init('auto', _node_ip_address='127.0.0.2', log_to_driver=False,"
            f" logging_level='ERROR'); print('\\nanswer:', json.dumps({expression}))"
        )
        command = [sys.executable, "-P", "-c", code]
        done = subprocess.run(command, capture_output=True, text=True, env=self.environment, cwd="/", check=False)
        assert done.returncode == 0, done.stderr[-2000:]
        return answer_in(done.stdout)

    def is_free(self) -> bool:
        """No placement group holds room."""
        states = "[group['state'] for group in ray.util.placement_group_table().values()]"
        return set(self.ask(states)) <= {"REMOVED"}

    def close(self) -> None:
        """Ends all nodes, the head last."""
        for number in sorted(self._nodes, reverse=True):
            processes = self.processes(number)
            self._nodes[number].send_signal(signal.SIGTERM)
            _, left = psutil.wait_procs(processes, timeout=10.0)
            for process in left:
                try:
                    process.kill()
                except psutil.NoSuchProcess:
                    continue
            self._nodes[number].wait()
        shutil.rmtree(self.folder, ignore_errors=True)


def answer_in(output: str) -> Any:
    """The JSON value behind `answer:` in a program's output, between whatever Ray writes there."""
    (line,) = (line for line in output.splitlines() if line.startswith("answer:"))
    return json.loads(line.removeprefix("answer:"))


def named(nodes: RayNodes, number: int, part: str) -> psutil.Process | None:
    """The process on a node whose command line has this."""
    for process in nodes.processes(number):
        try:
            if part in " ".join(process.cmdline()):
                return process
        except psutil.NoSuchProcess:
            continue
    return None
