"""Limits of CPU time and memory for work on clients' programs and texts.

CPU time does not depend on how busy the machine is. Python code is stopped by an exception; a process that is stuck in
one native call is killed by the kernel a little later. Only for processes that do nothing else, and for their main
threads, because signals and limits belong to a whole process.
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

_AGAIN_S = 0.1  # the exception is raised again, because some places, such as finalizers, swallow it


class OutOfTime(BaseException):
    """Raised anywhere in the work, so it is not an Exception, which the work might catch."""


class CpuLimit:
    """Stops calls that take too long. One per process."""

    def __init__(self) -> None:
        self._is_on = False
        signal.signal(signal.SIGPROF, self._on_signal)

    def within(self, seconds: float, work: Callable[[], T]) -> T:
        """The result of `work`. Raises OutOfTime after so much CPU time. A second later the kernel kills us."""
        try:
            with killed_after(seconds + 1):
                self._is_on = True
                signal.setitimer(signal.ITIMER_PROF, seconds, _AGAIN_S)
                return work()
        finally:
            self._is_on = False
            signal.setitimer(signal.ITIMER_PROF, 0)

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        if self._is_on:  # a signal may arrive just after the work
            raise OutOfTime


@contextmanager
def killed_after(cpu_s: float) -> Iterator[None]:
    """The kernel kills this process with SIGXCPU if the body takes more CPU time, up to a second later."""
    soft, hard = resource.getrlimit(resource.RLIMIT_CPU)
    until = math.ceil(time.process_time() + cpu_s)
    resource.setrlimit(resource.RLIMIT_CPU, (until if hard == resource.RLIM_INFINITY else min(until, hard), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_CPU, (soft, hard))


def used_memory() -> int:
    """The bytes of data that this process has allocated, touched or not."""
    return int(Path("/proc/self/statm").read_text().split()[5]) * os.sysconf("SC_PAGE_SIZE")


def return_memory() -> None:
    """Returns freed memory to the system, if the C library can."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def limit_memory(more_bytes: int) -> None:
    """Lets this process allocate so much more: then Python raises MemoryError, and most native code ends the process.
    Also disables core files, which would contain prompts."""
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    most = used_memory() + more_bytes
    resource.setrlimit(resource.RLIMIT_DATA, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
