"""The keeper of weights as a process, and a device without a GPU whose weights it keeps."""

import contextlib
import os
import socket
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch

from pagewire.engine.device.cpu import CpuDevice
from pagewire.engine.device.kept_memory import KeptMemory, host_memory
from pagewire.engine.device.queue import EagerQueue
from pagewire.procs import interpreter

_MEMFD = "pagewire-kept-weights"


class RunningKeeper:
    def __init__(self, address: Path, environment: Mapping[str, str]) -> None:
        self.address = str(address)
        self._lifeline, self._held = os.pipe()
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listening:
            listening.bind(self.address)
            listening.listen()
            fds = (listening.fileno(), self._lifeline)
            command = [*interpreter.COMMAND, "pagewire.procs.weight_keeper", *map(str, fds)]
            self.process = subprocess.Popen(command, pass_fds=fds, env=environment)

    def held(self) -> int:
        """Bytes of the memfds that it has open."""
        total = 0
        for fd in Path(f"/proc/{self.process.pid}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):
                total += fd.stat().st_size if _MEMFD in os.readlink(fd) else 0
        return total

    def contents(self) -> list[bytes]:
        """Of these memfds."""
        found = {}
        for fd in Path(f"/proc/{self.process.pid}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):
                if _MEMFD in os.readlink(fd):
                    found[int(fd.name)] = fd.read_bytes()
        return [found[number] for number in sorted(found)]

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def close(self) -> None:
        self.kill()
        os.close(self._lifeline)
        with contextlib.suppress(OSError):
            os.close(self._held)

    def end_lifeline(self) -> None:
        """The keeper believes then that the supervisor has ended."""
        os.close(self._held)


@contextlib.contextmanager
def running_keeper(folder: Path, environment: Mapping[str, str] | None = None) -> Iterator[RunningKeeper]:
    keeper = RunningKeeper(folder / "keeper", environment or interpreter.environment())
    try:
        yield keeper
    finally:
        keeper.close()


class KeptDevice(CpuDevice):
    """A GPU's path on a CPU: work is done when it is queued, and the keeper's memory is the host's."""

    def __init__(self) -> None:
        super().__init__(num_threads=torch.get_num_threads(), num_sharers=1)
        self.kept_memory: KeptMemory | None = host_memory()
        self.found: list[int] = []  # of each call of `cache_memory`

    def queue(self) -> EagerQueue:  # type: ignore[override]  # a CPU has none
        return EagerQueue(self.torch_device)

    def cache_memory(self, *, taken: int, found: int = 0) -> int:
        self.found.append(found)
        return super().cache_memory(taken=taken, found=found)
