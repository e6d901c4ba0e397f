"""Processes that may be killed, for work that may never finish or may take all memory.

Native code cannot be interrupted, and its cost cannot be seen from a grammar's or a template's text. So such work runs
in a process that does nothing else, with limits of CPU time and memory that the kernel enforces. Work that reaches a
limit fails its own request, and its process is replaced. The first process is started with the first work, or before
it by `Pool.prepare`.

`Pool` is the parent's side; `answer` is the main program of a process.
"""

import contextlib
import signal
import subprocess
import time
from collections.abc import Callable
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Literal

import msgspec
from msgspec import Struct

from ..config.config import EngineConfig
from ..errors import PagewireError
from . import interpreter
from .lifeline import end_with_parent
from .limits import killed_after, limit_memory

START_LIMIT_S = 60.0  # for a process, which reads the model's vocabulary
_WALL_FACTOR = 10  # wall time that work may take, per CPU time, because the machine may be busy
_MAX_PROCESSES = 2

Lost = Literal["late", "dead", "killed", "unstartable"]
"""Why work has no answer: it took too long; its process died of it, or was killed from outside, maybe by the kernel
because the machine's memory was short; no process can be started."""

_encode = msgspec.msgpack.Encoder().encode


class Work(Struct, frozen=True, array_like=True):
    """Work for a process."""

    data: bytes
    cpu_s: float  # limit


class Started(Struct, frozen=True, array_like=True):
    """The first message of a process."""

    complaint: str = ""  # why it cannot work; empty if it can


class _Process:
    def __init__(self, command: list[str], config: EngineConfig) -> None:
        self._connection, theirs = Pipe()
        self._process = subprocess.Popen(
            [*interpreter.COMMAND, *command, str(theirs.fileno())],
            pass_fds=(theirs.fileno(),),
            stdin=subprocess.DEVNULL,
            env=interpreter.environment(),
        )
        theirs.close()
        self._connection.send_bytes(_encode(config))
        self._deadline = time.monotonic() + START_LIMIT_S
        self.is_started = False
        self.key: int | None = None  # of its work

    def begin(self, key: int, work: Work) -> None:
        self.key = key
        self._deadline = time.monotonic() + _WALL_FACTOR * work.cpu_s
        with contextlib.suppress(OSError):  # it has just died; `look` reports that
            self._connection.send_bytes(_encode(work))

    @property
    def is_idle(self) -> bool:
        return self.is_started and self.key is None

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def look(self) -> bytes | None:
        """Its next message; None: there is none yet. Raises TimeoutError if it took too long, ProcessLookupError if it
        was killed, EOFError if it died otherwise."""
        try:
            if self._connection.poll():
                return self._connection.recv_bytes()
        except (OSError, EOFError) as error:
            match -self._process.wait():
                case signal.SIGXCPU:
                    raise TimeoutError from error
                case signal.SIGKILL:
                    raise ProcessLookupError from error
            raise EOFError from error
        if time.monotonic() > self._deadline:
            raise TimeoutError
        return None

    def close(self) -> None:
        self._connection.close()
        self._process.kill()
        self._process.wait()


class Pool:
    """The processes, and the work for them."""

    def __init__(self, config: EngineConfig, command: list[str]) -> None:
        """command: the arguments of `python -m`; the number of a file descriptor is added."""
        self._config = config
        self._command = command
        self._processes: list[_Process] = []
        self._waiting: dict[int, Work] = {}  # in order of arrival
        self._num_begun = 0
        self.complaint = ""  # of a process that could not be started

    @property
    def num_pending(self) -> int:
        """Work that `collect` has not returned yet."""
        return len(self._waiting) + self._num_begun

    @property
    def num_processes(self) -> int:
        return len(self._processes)

    @property
    def num_started(self) -> int:
        """Processes that take work at once, or after the work that they have."""
        return sum(process.is_started for process in self._processes)

    def prepare(self) -> None:
        """Starts the first process before there is work for it. `collect` sees that it has started."""
        if not self._processes and not self.complaint:
            self._processes.append(_Process(self._command, self._config))

    def begin(self, key: int, work: Work) -> None:
        """Queues work. `collect` returns its answer with this key."""
        self._waiting[key] = work

    def forget(self, key: int) -> bool:
        """Removes work from the queue. False: it was begun already, and `collect` will still return it."""
        return self._waiting.pop(key, None) is not None

    def collect(self) -> list[tuple[int, bytes | Lost]]:
        """The answers since the last call, and the reasons for work that has none. Begins waiting work."""
        done: list[tuple[int, bytes | Lost]] = []
        for process in list(self._processes):
            if not process.is_idle:
                self._look(process, done)
            elif not process.is_alive:  # killed from outside
                self._end(process)
        idle = [process for process in self._processes if process.is_idle]
        while self._waiting and idle:
            key = next(iter(self._waiting))
            idle.pop().begin(key, self._waiting.pop(key))
            self._num_begun += 1
        num_starting = sum(not process.is_started for process in self._processes)
        if len(self._waiting) > num_starting and len(self._processes) < _MAX_PROCESSES:
            self._processes.append(_Process(self._command, self._config))
        return done

    def close(self) -> None:
        """Ends the processes and drops all work."""
        for process in self._processes:
            process.close()
        self._processes.clear()
        self._waiting.clear()
        self._num_begun = 0

    def _look(self, process: _Process, done: list[tuple[int, bytes | Lost]]) -> None:
        answer: bytes | Lost | None
        try:
            answer = process.look()
        except TimeoutError:
            answer = "late"
        except ProcessLookupError:
            answer = "killed"
        except EOFError:
            answer = "dead"
        if answer is None:
            return
        if process.key is not None:
            done.append((process.key, answer))
            process.key = None
            self._num_begun -= 1
        elif isinstance(answer, bytes):
            self.complaint = msgspec.msgpack.decode(answer, type=Started).complaint
            process.is_started = not self.complaint
        if not isinstance(answer, bytes) or not process.is_started:
            if not process.is_started:  # no other process could be started either
                done += [(key, "unstartable") for key in self._waiting]
                self._waiting.clear()
            self._end(process)

    def _end(self, process: _Process) -> None:
        self._processes.remove(process)
        process.close()


def answer(fd: int, start: Callable[[EngineConfig], Callable[[bytes], bytes]], *, memory_bytes: int) -> None:
    """Does its parent's work until the parent ends. start: returns the function that does the work, which may allocate
    `memory_bytes`."""
    end_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group
    connection = Connection(fd)
    with contextlib.suppress(EOFError, OSError):
        config = msgspec.msgpack.decode(connection.recv_bytes(), type=EngineConfig)
        try:
            work = start(config)
        except PagewireError as error:
            connection.send_bytes(_encode(Started(str(error))))
            return
        limit_memory(memory_bytes)
        connection.send_bytes(_encode(Started()))
        while True:
            asked = msgspec.msgpack.decode(connection.recv_bytes(), type=Work)
            with killed_after(asked.cpu_s):
                said = work(asked.data)
            connection.send_bytes(said)
