"""Ends a process when its parent is gone."""

import contextlib
import os
import signal
import threading


def end_with_parent() -> None:
    """Has the kernel kill this process when its parent is gone, where the kernel can."""
    with contextlib.suppress(OSError, AttributeError):
        import ctypes

        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def tie_life_to(supervisor_pid: int, lifeline_fd: int) -> None:
    """Ends this process when the supervisor is gone, whatever either of them is doing.

    The kernel's signal also ends a process that is stuck in a long call; the pipe also covers kernels without it.
    """
    end_with_parent()
    if os.getppid() != supervisor_pid:
        os._exit(1)  # it died before prctl

    def watch() -> None:
        os.read(lifeline_fd, 1)
        os._exit(1)

    threading.Thread(target=watch, name="lifeline", daemon=True).start()
