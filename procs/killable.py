"""Work that may never come to an end, or take all memory, is done in processes that may be killed.

Native code cannot be interrupted, and what it will cost cannot be seen from a grammar's or a template's text. So each
piece of such work gets a limit of CPU time and of memory, which the kernel enforces, in a process of no other use; one
that reaches them costs its own request an error and is replaced. The first process is started with the first work.

`Pool` is the side of who asks; `answer` is the main program of a process.
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

START_LIMIT_S = 60.0  # for a process: it reads the model's vocabulary
_WAITS = 10  # how many times its CPU time a work may take by the clock, where the machine is busy
_MAX_PROCESSES = 2

Lost = Literal["late", "dead", "unstartable"]
"""Why there is no answer: the work took too long; the process died of it; no process can be started."""

_encode = msgspec.msgpack.Encoder().encode


class Work(Struct, frozen=True, array_like=True):
    """What a process is asked."""

    data: bytes
    cpu_s: float  # that it may take


class Started(Struct, frozen=True, array_like=True):
    """What a process says first."""

    complaint: str = ""  # why it cannot do any work


class _Process:
    """One of those that may be killed."""

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
        self.key: int | None = None  # of what it works on

    def begin(self, key: int, work: Work) -> None:
        self.key = key
        self._deadline = time.monotonic() + _WAITS * work.cpu_s
        with contextlib.suppress(OSError):  # it has just died, which `look` tells
            self._connection.send_bytes(_encode(work))

    @property
    def is_idle(self) -> bool:
        return self.is_started and self.key is None

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def look(self) -> bytes | None:
        """What it has said; None: nothing yet. Raises TimeoutError and EOFError if nothing will come."""
        try:
            if self._connection.poll():
                return self._connection.recv_bytes()
        except (OSError, EOFError) as error:
            if self._process.wait() == -signal.SIGXCPU:
                raise TimeoutError from error
            raise EOFError from error
        if time.monotonic() > self._deadline:
            raise TimeoutError
        return None

    def close(self) -> None:
        self._connection.close()
        self._process.kill()
        self._process.wait()


class Pool:
    """The processes, and the work that waits for them."""

    def __init__(self, config: EngineConfig, command: list[str]) -> None:
        """command: what follows `python -m` in front of the number of a descriptor."""
        self._config = config
        self._command = command
        self._processes: list[_Process] = []
        self._waiting: dict[int, Work] = {}  # in their order
        self._num_begun = 0
        self.complaint = ""  # of a process that could not be started

    @property
    def num_pending(self) -> int:
        """Works of which `collect` has not told."""
        return len(self._waiting) + self._num_begun

    @property
    def num_processes(self) -> int:
        return len(self._processes)

    def begin(self, key: int, work: Work) -> None:
        """Has it done. `collect` tells of it under this key."""
        self._waiting[key] = work

    def forget(self, key: int) -> bool:
        """Nobody wants it any longer. Returns whether it had not been begun: `collect` will not tell of it."""
        return self._waiting.pop(key, None) is not None

    def collect(self) -> list[tuple[int, bytes | Lost]]:
        """What is done, or will never be."""
        done: list[tuple[int, bytes | Lost]] = []
        for process in list(self._processes):
            if not process.is_idle:
                self._look(process, done)
            elif not process.is_alive:  # somebody else has killed it
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
        """Ends the processes. What was begun is forgotten."""
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
            if not process.is_started:  # others could not be started either
                done += [(key, "unstartable") for key in self._waiting]
                self._waiting.clear()
            self._end(process)

    def _end(self, process: _Process) -> None:
        self._processes.remove(process)
        process.close()


def answer(fd: int, start: Callable[[EngineConfig], Callable[[bytes], bytes]], *, memory_bytes: int) -> None:
    """Does what its parent asks until that is gone. start: gives what does the work, which may take `memory_bytes`."""
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
