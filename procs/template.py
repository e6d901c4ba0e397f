"""A process from which workers are forked: `python -m pagewire.procs.template FD`.

Importing torch takes most of a worker's start. The template imports it once and forks a worker when the supervisor asks
for one, so that a worker that is replaced starts at once, and the ranks of a group share the memory of what is
imported. It starts no thread, opens no device and reads no model. A worker ends with its template, and the template
with the supervisor.

`Template` is the supervisor's side, `Templates` those that several engines share; `main` is the program.
"""

import asyncio
import contextlib
import gc
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import msgspec
from msgspec import Struct

from ..config.config import EngineConfig
from . import interpreter
from .child import Launch, process_age_s, run_child
from .lifeline import end_with_parent

_MAX_MESSAGE = 1 << 16
_MAX_FDS = 8


class _Fork(Struct, frozen=True, array_like=True):
    """Asks for a worker. Its descriptors travel with it."""

    number: int
    name: str
    launch_file: str
    fds: tuple[str, ...]  # the fields of `Launch` that they belong to, in their order


class _Forked(Struct, frozen=True, array_like=True, tag=True):
    number: int
    pid: int


class _Ended(Struct, frozen=True, array_like=True, tag=True):
    number: int
    code: int  # as `Popen.returncode`


_encode = msgspec.msgpack.Encoder().encode


def can_fork(config: EngineConfig) -> bool:
    """Whether workers can be forked: on a CPU, where importing torch opens no device."""
    return config.kernels is not None and hasattr(os, "pidfd_open")


class ForkedProcess:
    """A worker that a template forks; the part of `asyncio.subprocess.Process` that a supervisor needs."""

    def __init__(self, template: "Template") -> None:
        self._template = template
        self._pidfd = -1  # until it is forked, and after its end
        self._ended = asyncio.Event()
        self._is_killed = False  # before it was forked
        self.pid = 0  # until it is forked
        self.returncode: int | None = None

    async def wait(self) -> int:
        await self._ended.wait()
        assert self.returncode is not None
        return self.returncode

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def send_signal(self, signum: int) -> None:
        """Raises ProcessLookupError if it has ended."""
        if self.returncode is not None:
            raise ProcessLookupError
        if self._pidfd >= 0:
            signal.pidfd_send_signal(self._pidfd, signum)
        elif not self.pid and signum == signal.SIGKILL:  # the template has not forked it yet
            self._is_killed = True
            self._template.kill_unless_needed()

    @property
    def is_wanted(self) -> bool:
        """It has not ended, and nobody has killed it before it began."""
        return self.returncode is None and not self._is_killed

    def forked(self, pid: int) -> None:
        self.pid = pid
        with contextlib.suppress(OSError):  # it has ended; `_Ended` follows
            self._pidfd = os.pidfd_open(pid)
            if self._is_killed:
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    def ended(self, code: int) -> None:
        self.returncode = code
        if self._pidfd >= 0:
            os.close(self._pidfd)
            self._pidfd = -1
        self._ended.set()


class Template:
    """A running template."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.setblocking(False)
        with theirs:
            self._process = subprocess.Popen(
                [*interpreter.COMMAND, "pagewire.procs.template", str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                env=environment,
            )
        self._decoder = msgspec.msgpack.Decoder(_Forked | _Ended)
        self._processes: dict[int, ForkedProcess] = {}  # by number; those that have not ended
        self._num_asked = 0
        self.is_alive = True
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._socket, self._read)

    def fork(self, name: str, launch_file: str, fds: Mapping[str, int]) -> ForkedProcess:
        """A worker, which is forked as soon as the template is ready. fds: fields of `Launch` and their descriptors;
        -1: none."""
        self._num_asked += 1
        process = self._processes[self._num_asked] = ForkedProcess(self)
        given = {field: fd for field, fd in fds.items() if fd >= 0}
        with contextlib.suppress(OSError):  # it has just died; `_read` reports that
            socket.send_fds(
                self._socket, [_encode(_Fork(self._num_asked, name, launch_file, tuple(given)))], [*given.values()]
            )
        return process

    def kill(self) -> None:
        """Ends it, and the workers that it has forked."""
        self._process.kill()

    def kill_unless_needed(self) -> None:
        """For a worker that it does not fork, perhaps because it hangs. Those of other engines go on."""
        if not any(process.is_wanted for process in self._processes.values()):
            self.kill()

    def close(self) -> None:
        """Kills it and waits for its end."""
        self.kill()
        self._lost()

    def _read(self) -> None:
        try:
            while data := self._socket.recv(_MAX_MESSAGE):
                message = self._decoder.decode(data)
                if isinstance(message, _Forked):
                    self._processes[message.number].forked(message.pid)
                else:
                    self._processes.pop(message.number).ended(message.code)
        except BlockingIOError:
            return
        except OSError:
            pass
        self._lost()

    def _lost(self) -> None:
        """The kernel kills a template's workers when it ends."""
        if not self.is_alive:
            return
        self.is_alive = False
        self._loop.remove_reader(self._socket)
        self._socket.close()
        self._process.kill()
        self._process.wait()
        for process in self._processes.values():
            process.ended(-signal.SIGKILL)
        self._processes.clear()


class Templates:
    """A template for each environment that workers need. Engines that share them start without importing torch again;
    if a template dies, the workers of all of them are replaced."""

    def __init__(self) -> None:
        self._of: dict[frozenset[tuple[str, str]], Template] = {}

    def fork(
        self, name: str, launch_file: str, fds: Mapping[str, int], environment: Mapping[str, str]
    ) -> ForkedProcess:
        """A worker with these variables. The others as of `Template.fork`."""
        key = frozenset(environment.items())
        template = self._of.get(key)
        if template is None or not template.is_alive:
            template = self._of[key] = Template(environment)
        return template.fork(name, launch_file, fds)

    def kill(self) -> None:
        """Ends all of them and their workers. Any thread may call it."""
        for template in list(self._of.values()):
            if template.is_alive:
                template.kill()

    def close(self) -> None:
        """Kills them and waits for their end."""
        for template in self._of.values():
            template.close()
        self._of.clear()


def main(fd: int) -> None:
    """Imports what a worker needs, and forks workers until the supervisor has ended."""
    end_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    import setproctitle

    setproctitle.setproctitle("pagewire: template")
    channel = socket.socket(fileno=fd)
    python_s = process_age_s()
    timings = {"python": python_s}
    gc.disable()  # what is imported stays; looking for garbage would take a tenth of the time
    with contextlib.suppress(Exception):  # the worker will fail to import it, too, and report that
        started = time.perf_counter()
        import torch

        timings[f"torch {torch.__version__}"] = time.perf_counter() - started
        from ..engine.runner import runner  # noqa: F401
        from . import worker  # noqa: F401
    timings["imports"] = process_age_s() - sum(timings.values())
    gc.freeze()  # so that collections in the workers do not write to what they share
    gc.enable()
    with selectors.DefaultSelector() as selector:
        selector.register(channel, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.data is not None:
                    number, pid = key.data
                    selector.unregister(key.fd)
                    os.close(key.fd)
                    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                    channel.send(_encode(_Ended(number, code)))
                    continue
                data, fds, _, _ = socket.recv_fds(channel, _MAX_MESSAGE, _MAX_FDS)
                if not data:
                    return
                asked = msgspec.msgpack.decode(data, type=_Fork)
                if (pid := os.fork()) == 0:
                    selector.close()
                    channel.close()
                    _be_worker(asked, fds, timings)
                timings = {}  # they belong to the start of the first worker only
                for received in fds:
                    os.close(received)
                selector.register(os.pidfd_open(pid), selectors.EVENT_READ, (asked.number, pid))
                channel.send(_encode(_Forked(asked.number, pid)))


def _be_worker(asked: _Fork, fds: list[int], timings: Mapping[str, float]) -> None:
    """Does not return."""
    code = 1
    try:
        launch = msgspec.json.decode(Path(asked.launch_file).read_bytes(), type=Launch)
        Path(asked.launch_file).unlink()
        given = dict(zip(asked.fds, fds, strict=True))
        launch = msgspec.structs.replace(launch, supervisor_pid=os.getppid(), **given)
        code = run_child(asked.name, launch, timings)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    main(int(sys.argv[1]))
