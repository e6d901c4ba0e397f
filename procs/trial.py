"""Grammars are tried out here first: compiled in processes that may be killed, within limits of time and memory.

Compiling is native code that nothing can interrupt, and what it costs cannot be seen from a grammar's text. So whoever
would follow a grammar lets a process of no other use compile it and fill its first mask, once for each choice. What
got through there gets through again, in the process that goes on with it, which nobody's request can then hold up for
longer than the limit or take down. A grammar that got through is remembered: most requests of a program come with the
same one.

The first process is started with the first grammar. `python -m pagewire.procs.trial` is its main program.
"""

import contextlib
import importlib
import logging
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import msgspec
from msgspec import Struct, structs

from ..config import EngineConfig
from ..errors import ErrorKind, PagewireError, RequestError
from ..ipc.messages import Constraint
from .child import end_with_parent

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

LIMIT_S = 2.0  # for a grammar
START_LIMIT_S = 60.0  # for a process: it reads the model's vocabulary
MEMORY_BYTES = 512 * 2**20  # that a grammar may take
_MOST_PROCESSES = 2
_MOST_PASSED = 256  # grammars that are remembered

_encode = msgspec.msgpack.Encoder().encode
log = logging.getLogger("pagewire.grammar")


class Matcher(Protocol):
    """One sequence and the grammar that it follows."""

    def accept(self, ids: list[int]) -> None:
        """The sequence goes on with these tokens."""

    def fill(self, mask: "NDArray[np.int32]") -> bool:
        """Sets the bits of the tokens that may come next, [⌈vocab / 32⌉]. False: any may, and `mask` means nothing."""

    @property
    def is_ended(self) -> bool:
        """Nothing but the end may come."""


class Compiler(Protocol):
    """All grammars of one vocabulary."""

    def compile(self, constraint: Constraint, prompt_tail: str) -> Matcher:
        """Raises RequestError. prompt_tail: the text of the prompt's last tokens."""


Load = Callable[[EngineConfig], Compiler]
"""A function of a module, by whose name another process finds it. Raises ConfigError."""


class Trial(Struct, frozen=True, array_like=True):
    """What a process is asked to compile."""

    constraint: Constraint
    n: int  # times


class Outcome(Struct, frozen=True, array_like=True):
    """What a process says: first that it has started, then of each grammar."""

    kind: ErrorKind | None = None  # None: all is well
    detail: str = ""


_TOO_LARGE = Outcome("invalid_request", "The grammar is too large or too deep to be compiled: simplify it.")


def num_words(config: EngineConfig) -> int:
    """Of a mask."""
    return -(-config.vocab_size // 32)


class _Process:
    """One of those that may be killed."""

    def __init__(self, config: EngineConfig, load: Load) -> None:
        self._connection, theirs = Pipe()
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__, f"{load.__module__}:{load.__qualname__}", str(theirs.fileno())],
            pass_fds=(theirs.fileno(),),
            stdin=subprocess.DEVNULL,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},  # it imports what we do
        )
        theirs.close()
        self._connection.send_bytes(_encode(structs.replace(config, api_keys=(), admin_keys=())))
        self._deadline = time.monotonic() + START_LIMIT_S
        self.is_started = False
        self.rid: int | None = None  # whose grammar it compiles

    def begin(self, rid: int, trial: Trial) -> None:
        self.rid = rid
        self._deadline = time.monotonic() + LIMIT_S
        with contextlib.suppress(OSError):  # it has just died, which `look` tells
            self._connection.send_bytes(_encode(trial))

    @property
    def is_idle(self) -> bool:
        return self.is_started and self.rid is None

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def look(self) -> Outcome | None:
        """What it has said; None: nothing yet. Raises TimeoutError and EOFError if nothing will come."""
        try:
            if self._connection.poll():
                return msgspec.msgpack.decode(self._connection.recv_bytes(), type=Outcome)
        except OSError as error:
            raise EOFError from error
        if time.monotonic() > self._deadline:
            raise TimeoutError
        return None

    def close(self) -> None:
        self._connection.close()
        self._process.kill()
        self._process.wait()


class Trials:
    """The processes, and the grammars that wait for them."""

    def __init__(self, config: EngineConfig, load: Load) -> None:
        self._config = config
        self._load = load
        self._processes: list[_Process] = []
        self._waiting: dict[int, Trial] = {}  # in their order
        self._tried: dict[int, Trial] = {}  # rid → its grammar, while it waits or is compiled
        self._passed: dict[bytes, int] = {}  # grammar → how often it was compiled; the one asked for last at the end
        self._done: list[tuple[int, Outcome]] = []

    @property
    def num_pending(self) -> int:
        """Grammars of which `collect` has not told."""
        return len(self._tried) + len(self._done)

    def begin(self, rid: int, trial: Trial) -> None:
        """Tries a grammar out."""
        if self._passed.get(_encode(trial.constraint), 0) >= trial.n:
            self._done.append((rid, self._pass(trial)))
            return
        self._tried[rid] = trial
        self._waiting[rid] = trial

    def forget(self, rid: int) -> None:
        """Nobody wants it any longer: if it still waits, it is through."""
        if self._waiting.pop(rid, None) is not None:
            del self._tried[rid]
            self._done.append((rid, Outcome()))

    def collect(self) -> list[tuple[int, Outcome]]:
        """The rids whose grammars are through, well or not."""
        for process in list(self._processes):
            if not process.is_idle:
                self._look(process)
            elif not process.is_alive:  # somebody else has killed it
                self._end(process)
        idle = [process for process in self._processes if process.is_idle]
        while self._waiting and idle:
            rid = next(iter(self._waiting))
            idle.pop().begin(rid, self._waiting.pop(rid))
        num_starting = sum(not process.is_started for process in self._processes)
        if len(self._waiting) > num_starting and len(self._processes) < _MOST_PROCESSES:
            self._processes.append(_Process(self._config, self._load))
        done, self._done = self._done, []
        return done

    def close(self) -> None:
        """Ends the processes. Nothing is tried any more."""
        for process in self._processes:
            process.close()
        self._processes.clear()
        self._waiting.clear()
        self._tried.clear()
        self._done.clear()

    def _look(self, process: _Process) -> None:
        try:
            outcome = process.look()
        except TimeoutError:
            outcome = Outcome("invalid_request", f"The grammar takes more than {LIMIT_S:g} s to compile: simplify it.")
            self._end(process)
        except EOFError:
            outcome = _TOO_LARGE
            self._end(process)
        if outcome is None:
            return
        if process.rid is not None:
            trial = self._tried.pop(process.rid)
            self._done.append((process.rid, self._pass(trial) if outcome.kind is None else outcome))
            process.rid = None
        elif process in self._processes and outcome.kind is None:
            process.is_started = True
        else:  # it could not be started, and others could not either
            if process in self._processes:
                self._end(process)
            else:
                outcome = Outcome("internal", "Grammars cannot be compiled: the process that does it ends at once.")
            for rid in self._waiting:
                del self._tried[rid]
                self._done.append((rid, outcome))
            self._waiting.clear()

    def _end(self, process: _Process) -> None:
        self._processes.remove(process)
        process.close()

    def _pass(self, trial: Trial) -> Outcome:
        grammar = _encode(trial.constraint)
        self._passed[grammar] = max(self._passed.pop(grammar, 0), trial.n)
        if len(self._passed) > _MOST_PASSED:
            del self._passed[next(iter(self._passed))]
        return Outcome()


def try_out(trial: Trial, compiler: Compiler, num_words: int) -> Outcome:
    """Compiles it, and fills its first masks."""
    import numpy as np

    try:
        matchers = [compiler.compile(trial.constraint, "") for _ in range(trial.n)]
        for matcher in matchers:
            matcher.fill(np.zeros(num_words, np.int32))
    except RequestError as error:
        return Outcome(error.kind, str(error))
    except MemoryError:
        return _TOO_LARGE
    except Exception as error:
        log.exception("a grammar could not be compiled")
        return Outcome("internal", f"The grammar could not be compiled ({type(error).__name__}).")
    return Outcome()


def main(load: str, fd: int) -> None:
    """Answers its parent until that is gone."""
    end_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group
    connection = Connection(fd)
    with contextlib.suppress(EOFError, OSError):
        config = msgspec.msgpack.decode(connection.recv_bytes(), type=EngineConfig)
        module, _, name = load.partition(":")
        try:
            compiler: Compiler = getattr(importlib.import_module(module), name)(config)
        except PagewireError as error:
            connection.send_bytes(_encode(Outcome("invalid_request", str(error))))
            return
        used = int(Path("/proc/self/statm").read_text().split()[5]) * os.sysconf("SC_PAGE_SIZE")
        resource.setrlimit(resource.RLIMIT_DATA, (used + MEMORY_BYTES, used + MEMORY_BYTES))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        connection.send_bytes(_encode(Outcome()))
        while True:
            trial = msgspec.msgpack.decode(connection.recv_bytes(), type=Trial)
            connection.send_bytes(_encode(try_out(trial, compiler, num_words(config))))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
