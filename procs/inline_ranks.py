"""The ranks of an engine in one process (`inline.py`), but the first: processes, since ranks compute at the same time.

They are actors as those of a server, with mailboxes in a folder that only their user can enter. This process is core,
first rank and supervisor for them. They end with it, and it ends with the first of them that fails.
"""

import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from ..config.config import EngineConfig
from ..engine.parallel.rank import RankInfo
from ..errors import ConfigError, PagewireError, StartError
from ..ipc.epochs import Epochs
from ..ipc.messages import CacheOffer, Fault, Message, OpenCache, Ready, Sleep, Slept, Stop, ToCore, ToSupervisor, Wake
from ..ipc.zmq_channel import ZmqContext, ZmqInbox
from . import interpreter
from .child import Launch
from .environment import environment_of
from .rank_memory import RankMemory
from .topology import RENDEZVOUS, index, link, workers

_WAIT_S = 0.05  # for messages of the ranks, between looks whether all of them live
_FAULT_WAIT_S = 0.5  # for what a rank sent before it ended
_END_WAIT_S = 5.0  # for the end of a rank that another one has noticed
_STOP_WAIT_S = 10.0


class InlineRanks:
    """Used by one thread."""

    def __init__(self, config: EngineConfig) -> None:
        """Starts them. `first` is the rank that this process is to be."""
        self._names = workers(config.num_ranks)[1:]
        self._folder = Path(tempfile.mkdtemp(prefix="pagewire-"))
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._context = ZmqContext(None, Epochs())
        self._lifeline = os.pipe()
        self._num_owed = len(self._names)  # answers that they have not sent yet; first each offers its cache
        addresses = {name: f"ipc://{self._folder}/{name}" for name in ("core", "supervisor", *self._names)}
        memory = RankMemory(config, are_alone=True)
        try:
            self._from_ranks: ZmqInbox[ToCore] = self._context.inbox(addresses["core"], ToCore)
            self._of_ends: ZmqInbox[ToSupervisor] = self._context.inbox(addresses["supervisor"], ToSupervisor)
            self._outboxes = {name: self._context.outbox(addresses[name], link("core", name)) for name in self._names}
            self._stops = {
                name: self._context.outbox(addresses[name], link("supervisor", name)) for name in self._names
            }
            launch = Launch(
                config=config, http=None, num_apis=0, addresses=addresses, keys=None, supervisor_pid=os.getpid(),
                lifeline_fd=self._lifeline[0], http_fd=-1, progress=False, ranks_here=tuple(range(config.num_ranks)),
                rendezvous=f"file://{self._folder}/{RENDEZVOUS}",
            )  # fmt: skip
            for name in self._names:
                self._start(name, msgspec.structs.replace(launch, **memory.fields(index(name))))
            own = memory.fields(0)["memory_fd"]
            self.first = RankInfo(0, launch.ranks_here, launch.rendezvous, os.dup(own) if own >= 0 else -1)
        except BaseException:
            self.close()
            raise
        finally:
            memory.close()

    def _start(self, name: str, launch: Launch) -> None:
        file = self._folder / f"launch-{name}.json"
        with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as opened:
            opened.write(msgspec.json.encode(launch))
        self._processes[name] = subprocess.Popen(
            [*interpreter.COMMAND, "pagewire.procs.child", name, str(file)],
            stdin=subprocess.DEVNULL,
            pass_fds=[fd for fd in (launch.lifeline_fd, launch.memory_fd) if fd >= 0],
            env=environment_of(name, launch.config, ranks_are_here=True),
        )

    def send(self, name: str, message: Message) -> None:
        """The ranks must get a plan before the first one computes its part, which waits for theirs."""
        self._num_owed += isinstance(message, OpenCache | Sleep | Wake)
        self._outboxes[name].send(message)

    @property
    def is_waiting(self) -> bool:
        """Whether the ranks have not answered all that they were told."""
        return self._num_owed > 0

    def hear(self, *, wait: bool) -> Iterator[Message]:
        """What they have sent to the core. wait: a moment, until there is something. Raises as `check` does."""
        if wait:
            self._from_ranks.wait(_WAIT_S)
        for message in self._from_ranks.drain():
            self._num_owed -= isinstance(message, CacheOffer | Slept)
            yield message
        self.check()

    def check(self) -> None:
        """Raises StartError if one of them has failed, and ConfigError if the user can correct it."""
        ended = [(name, process) for name, process in self._processes.items() if process.poll() is not None]
        if ended:
            self._of_ends.wait(_FAULT_WAIT_S)
        for message in self._of_ends.drain():
            if isinstance(message, Fault) and message.exit_code == 2:
                raise ConfigError(message.summary)
            if isinstance(message, Fault):
                raise StartError(f"{message.name}: {message.summary}")
            self._num_owed -= isinstance(message, Ready)
        for name, process in ended:
            raise StartError(f"{name} has ended with code {process.returncode}.")

    def explain(self, error: BaseException) -> BaseException:
        """Why the first rank has failed, if that is because another one did."""
        deadline = time.monotonic() + _END_WAIT_S
        while time.monotonic() < deadline and "has ended" in str(error):
            try:
                self._of_ends.wait(_WAIT_S)
                self.check()
            except PagewireError as found:
                return found
        return error

    def close(self) -> None:
        """Ends them."""
        for name, process in self._processes.items():
            if process.poll() is None:
                self._stops[name].send(Stop(0.0, ""))
        deadline = time.monotonic() + _STOP_WAIT_S
        for process in self._processes.values():
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._processes.clear()
        self._context.close()
        for fd in self._lifeline:
            os.close(fd)
        self._lifeline = ()  # type: ignore[assignment]
        shutil.rmtree(self._folder, ignore_errors=True)
