"""Many engines at little cost: each is one process with the real api, tokenizer, core, detokenizer and a null worker.

`python -m pagewire.bench.serve.small_engines MODEL NUM_ENGINES FIRST_ID NUM_IDS STEP_MS MAX_NUM_SEQS` forks each
engine from one process, so that they share the memory of what is imported. The actors are those of a server; their
messages are passed as objects, and nobody watches them. `small_engines` runs it, for benchmarks of a router.
"""

import asyncio
import gc
import os
import signal
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import uvloop

from ...config.config import EngineConfig, HttpConfig, ListenOptions
from ...config.flags import make_config
from ...ipc.actor import Actor
from ...ipc.messages import CacheOffer, Message, OpenCache, Ping, Serve, StepPlan, StepResult
from ...procs.api import ApiActor
from ...procs.core import CoreActor
from ...procs.detokenizer import DetokenizerActor
from ...procs.lifeline import end_with_parent
from ...procs.listening import Listening
from ...procs.prepare import prepare_server
from ...procs.tokenizer import TokenizerActor
from ...tools.servers import end
from .null_worker import NUM_BLOCKS, NullWorker

_PING_INTERVAL_S = 0.5  # as a supervisor
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class SmallEngine:
    """One engine. Create it on the loop that runs it."""

    def __init__(self, config: EngineConfig, http: HttpConfig, http_fd: int, *, ids: range, step_s: float) -> None:
        self._loop = asyncio.get_running_loop()
        self._actors: dict[str, Actor[Any]] = {  # Any: the topology says which messages each is sent
            "tokenizer": TokenizerActor(config),
            "core": CoreActor(config),
            "detokenizer": DetokenizerActor(config),
            "api": ApiActor(config, http, http_fd=http_fd),
        }
        self._mail: dict[str, deque[Message]] = {name: deque() for name in self._actors}
        self._worker = NullWorker(first_id=ids.start, num_ids=len(ids))
        self._step_s = step_s
        self._free_at = 0.0  # end of the worker's last step
        self._results: deque[StepResult] = deque()  # of steps that have not ended
        self._is_due = False  # a delivery is scheduled
        for actor in self._actors.values():
            actor.start(self.post)
        self.post("core", CacheOffer(0, NUM_BLOCKS))
        self.post("api", Serve())
        self._ping()

    def post(self, receiver: str, message: Message) -> None:
        """Mail for the supervisor and for the grammar process, which are not there, is dropped."""
        if receiver == "worker":
            self._compute(message)
        elif receiver in self._mail:
            self._mail[receiver].append(message)
            if not self._is_due:
                self._is_due = True
                self._loop.call_soon(self._deliver)

    async def stop(self) -> None:
        await self._actors["api"].stop(0.0)

    def _deliver(self) -> None:
        self._is_due = False
        for name, actor in self._actors.items():
            if mail := self._mail[name]:
                messages = [*mail]
                mail.clear()
                actor.handle(messages)

    def _compute(self, message: Message) -> None:
        assert isinstance(message, StepPlan | OpenCache), message
        if isinstance(message, StepPlan):
            self._results.append(self._worker.run(message))
            self._free_at = max(self._free_at, self._loop.time()) + self._step_s
            # uvloop's timers are whole milliseconds, and those of the same one end in any order.
            self._loop.call_at(self._free_at, lambda: self.post("core", self._results.popleft()))

    def _ping(self) -> None:
        self.post("core", Ping())
        self._loop.call_later(_PING_INTERVAL_S, self._ping)


async def _serve(config: EngineConfig, http: HttpConfig, http_fd: int, ids: range, step_s: float) -> None:
    asyncio.get_running_loop().set_exception_handler(_end_at_once)
    engine = SmallEngine(config, http, http_fd, ids=ids, step_s=step_s)
    ended = asyncio.Event()
    for signum in _SIGNALS:
        asyncio.get_running_loop().add_signal_handler(signum, ended.set)
    await ended.wait()
    await engine.stop()


def _end_at_once(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Lets clients see that the engine has failed."""
    loop.default_exception_handler(context)
    os._exit(1)


def _fork(config: EngineConfig, http: HttpConfig, ids: range, step_s: float) -> tuple[int, int]:
    """Starts an engine, which ends with this process. Its pid and its port."""
    listening = Listening(ListenOptions(port=0))
    with socket.socket(fileno=os.dup(listening.fd)) as own:
        port = int(own.getsockname()[1])
    pid = os.fork()
    if pid == 0:
        try:
            end_with_parent()
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
            uvloop.run(_serve(config, http, listening.fd, ids, step_s))
        finally:
            os._exit(0)
    listening.close()
    return pid, port


def main(model: str, num_engines: str, first_id: str, num_ids: str, step_ms: str, max_num_seqs: str) -> None:
    """Prints the ports as one line, and runs until SIGTERM."""
    config = prepare_server(make_config(model=model, max_num_seqs=int(max_num_seqs), access_log=False))
    ids = range(int(first_id), int(first_id) + int(num_ids))
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    gc.freeze()  # the engines do not copy what none of them changes
    engines = [_fork(config.engine, config.http, ids, float(step_ms) / 1e3) for _ in range(int(num_engines))]
    print(*(port for _, port in engines), flush=True)
    signal.sigwait(_SIGNALS)
    for pid, _ in engines:
        os.kill(pid, signal.SIGTERM)
    for pid, _ in engines:
        os.waitpid(pid, 0)


@contextmanager
def small_engines(folder: Path, ids: range, num: int, *, step_ms: float, max_num_seqs: int) -> Iterator[list[int]]:
    """Runs `num` engines, which may not listen yet. Their ports. Raises SystemExit if they do not start."""
    numbers = (num, ids.start, len(ids), step_ms, max_num_seqs)
    command = [sys.executable, "-m", "pagewire.bench.serve.small_engines", str(folder), *map(str, numbers)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            if not (line := process.stdout.readline()):
                raise SystemExit("the engines did not start")
            yield [int(port) for port in line.split()]
        finally:
            end(process)


if __name__ == "__main__":
    main(*sys.argv[1:])
