"""Ends a process when its parent has ended."""

import contextlib
import os
import signal
import sys
import threading


def end_with_parent() -> None:
    """Makes the kernel kill this process when its parent ends (Linux only)."""
    with contextlib.suppress(OSError, AttributeError):
        import ctypes

        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def tie_life_to(supervisor_pid: int, lifeline_fd: int) -> None:
    """Ends this process when the supervisor ends, however it ends.

    The kernel's signal also ends a process that is stuck in a long call. The pipe also works on kernels without it.
    """
    end_with_parent()
    if os.getppid() != supervisor_pid:
        os._exit(1)  # the supervisor ended before prctl
    end_with(lifeline_fd)


def end_with(lifeline_fd: int) -> None:
    """Ends this process when nobody holds the other end of a pipe any more."""

    def watch() -> None:
        os.read(lifeline_fd, 1)
        os._exit(1)

    threading.Thread(target=watch, name="lifeline", daemon=True).start()


def read_line(fd: int) -> bytes:
    """The first line of a pipe, and no byte after it, since that is the lifeline's. Exits if there is none."""
    found = bytearray()
    while not found.endswith(b"\n"):
        if not (byte := os.read(fd, 1)):
            sys.exit(1)
        found += byte
    return bytes(found)
