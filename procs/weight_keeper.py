"""The process that holds a GPU's memory for packed weights, so that they outlive the worker:
`python -m pagewire.procs.weight_keeper LISTENING_FD LIFELINE_FD`.

It allocates what a worker asks for (`engine/device/keeper.py`), maps nothing, creates no context of CUDA and runs
nothing on the device. A worker that crashes, or whose device is broken by a kernel, therefore does not take it along.
It ends with the supervisor.

`WeightKeeper` is the supervisor's side; `main` is the program.
"""

import asyncio
import contextlib
import os
import selectors
import signal
import socket
import sys
import tempfile
from collections.abc import Callable, Mapping
from typing import assert_never

import msgspec

from ..engine.device.allocations import Allocation, AllocationError, DescribedMemory, memory_of
from ..engine.device.keeper import MAX_MESSAGE, Allocate, Answer, Count, Drop, Keep, Open, Request
from . import interpreter
from .lifeline import end_with_parent

_BACKLOG = 8

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Request).decode

Held = tuple[DescribedMemory, Allocation]


class WeightKeeper:
    """A running keeper of one rank."""

    def __init__(self, rank: int, address: str, process: asyncio.subprocess.Process) -> None:
        self.rank, self.address, self.process = rank, address, process
        self.exited = asyncio.ensure_future(process.wait())

    @classmethod
    async def start(cls, rank: int, address: str, lifeline_fd: int, environment: Mapping[str, str]) -> "WeightKeeper":
        """address: a path for its socket. environment: as of the worker, which decides the GPU's number. Raises
        OSError."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(address)
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listening:
            listening.bind(address)
            listening.listen(_BACKLOG)
            fds = (listening.fileno(), lifeline_fd)
            process = await asyncio.create_subprocess_exec(
                *interpreter.COMMAND, "pagewire.procs.weight_keeper", *map(str, fds),
                stdin=asyncio.subprocess.DEVNULL, pass_fds=fds, env=environment,
            )  # fmt: skip
        return cls(rank, address, process)

    async def end(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()
        await self.exited


async def while_it_runs(use: Callable[[str], str]) -> str:
    """What `use` returns for the address of a keeper, which ends afterwards. Raises OSError."""
    lifeline, held = os.pipe()
    try:
        with tempfile.TemporaryDirectory(prefix="pagewire-") as folder:
            keeper = await WeightKeeper.start(0, f"{folder}/keeper", lifeline, interpreter.environment())
            try:
                return use(keeper.address)
            finally:
                await keeper.end()
    finally:
        os.close(lifeline)
        os.close(held)


class _Holder:
    """What is held: for connections, and under a token."""

    def __init__(self) -> None:
        self._memories: dict[str, DescribedMemory] = {}
        self._asked: dict[socket.socket, list[Held]] = {}
        self._kept: list[Held] = []
        self._token = b""

    def serve(self, worker: socket.socket) -> bool:
        """Answers a request. False: the connection has ended."""
        try:
            data = worker.recv(MAX_MESSAGE)
        except OSError:
            data = b""
        if not data:
            self._free(self._asked.pop(worker, []))
            return False
        fd = -1
        try:
            answer, fd = self._answer(worker, _decode(data))
        except (AllocationError, msgspec.MsgspecError) as error:
            answer = Answer(problem=str(error))
        with contextlib.suppress(OSError):  # it has ended; the next call sees that
            socket.send_fds(worker, [_encode(answer)], [fd] if fd >= 0 else [])
        return True

    def _answer(self, worker: socket.socket, request: Request) -> tuple[Answer, int]:
        """With a descriptor that stays ours, or -1. Raises AllocationError."""
        asked = self._asked.setdefault(worker, [])
        match request:
            case Allocate():
                if request.kind not in self._memories:
                    self._memories[request.kind] = memory_of(request.kind)
                memory = self._memories[request.kind]
                allocation = memory.allocate(request.num_bytes)
                asked.append((memory, allocation))
                return Answer(allocation.num_bytes), allocation.fd
            case Keep():
                before, self._kept, self._token = self._kept, asked[:], request.token
                asked.clear()
                self._free(before)
            case Open():
                if request.token != self._token or not 0 <= request.number < len(self._kept):
                    raise AllocationError("the keeper does not hold these weights")
                allocation = self._kept[request.number][1]
                return Answer(allocation.num_bytes), allocation.fd
            case Drop():
                self._free(asked)
                if request.kept:
                    self._free(self._kept)
                    self._token = b""
            case Count():
                return Answer(sum(allocation.num_bytes for _, allocation in self._kept)), -1
            case _:
                assert_never(request)
        return Answer(), -1

    def _free(self, held: list[Held]) -> None:
        while held:
            memory, allocation = held.pop()
            memory.free(allocation)


def main(listening_fd: int, lifeline_fd: int) -> None:
    """Holds memory until the supervisor has ended."""
    end_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    import setproctitle

    setproctitle.setproctitle("pagewire: weight keeper")
    holder = _Holder()
    with socket.socket(fileno=listening_fd) as listening, selectors.DefaultSelector() as selector:
        selector.register(lifeline_fd, selectors.EVENT_READ)
        selector.register(listening, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.fd == lifeline_fd:
                    return
                if key.fileobj is listening:
                    selector.register(listening.accept()[0], selectors.EVENT_READ)
                    continue
                assert isinstance(key.fileobj, socket.socket)
                if not holder.serve(key.fileobj):
                    selector.unregister(key.fileobj)
                    key.fileobj.close()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
