"""Limits on what strangers' programs and texts may cost the process that works on them.

Time is that of the CPU: a machine that is busy with other things makes nobody guilty. The kernel kills a process that
is stuck in one call; what runs in Python is stopped by an exception before. Only for processes of our own and their
main threads: signals and limits belong to a whole process.
"""

import ctypes
import math
import os
import resource
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import TypeVar

T = TypeVar("T")

_AGAIN_S = 0.1  # an exception may be lost where Python can raise none, as in a finalizer


class OutOfTime(BaseException):
    """Raised in the midst of anything, so nothing that catches an Exception may take it for one of its own."""


class CpuLimit:
    """Stops calls that take too long. One for a process."""

    def __init__(self) -> None:
        self._is_on = False
        signal.signal(signal.SIGPROF, self._on_signal)

    def within(self, seconds: float, work: Callable[[], T]) -> T:
        """What `work` returns. Raises OutOfTime; a second later the kernel kills the process."""
        try:
            with killed_after(seconds + 1):
                self._is_on = True
                signal.setitimer(signal.ITIMER_PROF, seconds, _AGAIN_S)
                return work()
        finally:
            self._is_on = False
            signal.setitimer(signal.ITIMER_PROF, 0)

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        if self._is_on:  # one may come just after the work
            raise OutOfTime


@contextmanager
def killed_after(cpu_s: float) -> Iterator[None]:
    """Has the kernel kill this process with SIGXCPU if what is inside takes more; up to a second later."""
    soft, hard = resource.getrlimit(resource.RLIMIT_CPU)
    until = math.ceil(time.process_time() + cpu_s)
    resource.setrlimit(resource.RLIMIT_CPU, (until if hard == resource.RLIM_INFINITY else min(until, hard), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_CPU, (soft, hard))


def used_memory() -> int:
    """Bytes that this process has allocated, used or not."""
    return int(Path("/proc/self/statm").read_text().split()[5]) * os.sysconf("SC_PAGE_SIZE")


def return_memory() -> None:
    """Gives what was freed back to the system, where the C library can."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def limit_memory(more_bytes: int) -> None:
    """From now on this process may allocate so much: Python then raises MemoryError, most else ends the process. It
    leaves no core file, which would hold prompts."""
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    most = used_memory() + more_bytes
    resource.setrlimit(resource.RLIMIT_DATA, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
