"""Decides whether a process hangs, and when processes have died, or connections between them, too often.

Every process answers `Ping` from the loop that does its work, so a process that does not answer hangs. A worker does
not answer during a step, so it counts as busy while the kernel accounts CPU time to it. A worker that answers but
completes no step is stuck on its device.
"""

import os
from collections import deque
from pathlib import Path

from ..ipc.messages import Pong

STEP_LIMIT_S = 120.0  # one step of a large model on a slow CPU takes many seconds
STORM_DEATHS = 5  # with more deaths within STORM_S, beginning anew does not help
STORM_S = 60.0


class Liveness:
    """The liveness of one process that is ready. Times are seconds of one monotonic clock."""

    def __init__(self, pid: int, *, may_be_busy: bool, now: float) -> None:
        """`may_be_busy`: the process does not answer while it works."""
        self._pid = pid
        self._may_be_busy = may_be_busy
        self._heard_at = now
        self._progress = -1
        self._progressed_at = now  # when it last completed something or had nothing to do
        self._cpu_ticks = -1
        self._cpu_at = now  # when it last used CPU time

    def heard(self, pong: Pong, now: float) -> None:
        self._heard_at = self._cpu_at = now
        if pong.progress != self._progress or not pong.is_busy:
            self._progress = pong.progress
            self._progressed_at = now

    def excuse(self, now: float) -> None:
        """Starts all limits again, because the supervisor itself did not read answers for a while."""
        self._heard_at = self._cpu_at = self._progressed_at = now

    def complaint(self, hang_timeout_s: float, now: float) -> str | None:
        """Why the process counts as hung; None: it does not."""
        if now - self._progressed_at > STEP_LIMIT_S:
            return f"has been at one step for {now - self._progressed_at:.0f} s"
        if self._may_be_busy and (ticks := _cpu_ticks(self._pid)) != self._cpu_ticks:
            self._cpu_ticks, self._cpu_at = ticks, now
        silent_s = now - (self._cpu_at if self._may_be_busy else self._heard_at)
        if silent_s > hang_timeout_s:
            return f"has said nothing for {silent_s:.1f} s"
        return None


def _cpu_ticks(pid: int) -> int:
    """User and system time of a process, in clock ticks; -1 if /proc does not show it."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return int(fields[11]) + int(fields[12])
    except (OSError, IndexError, ValueError):
        return -1


class Deaths:
    """The deaths of processes of one launch, and of connections between machines, within the last `STORM_S`."""

    def __init__(self) -> None:
        self._last: deque[tuple[float, str]] = deque()  # when (s), and what

    def add(self, name: str, cause: str, now: float) -> int:
        """`name`: of a process or a connection. How often it has died within `STORM_S` of the same cause."""
        what = f"{name} {cause}"
        self._last.append((now, what))
        while self._last[0][0] < now - STORM_S:
            self._last.popleft()
        return sum(one == what for _, one in self._last)

    def __len__(self) -> int:
        return len(self._last)

    @property
    def are_a_storm(self) -> bool:
        """Whether there are too many to go on replacing processes."""
        return len(self._last) > STORM_DEATHS

    def summary(self) -> str:
        """The deaths with their causes, for the operator."""
        lines = (f"  {at - self._last[-1][0]:6.1f} s  {what}" for at, what in self._last)
        return "\n".join([f"{len(self._last)} processes or connections have died within {STORM_S:.0f} s:", *lines])


def dump_stacks_on_quit() -> None:
    """Makes SIGQUIT print the stacks of all threads. The supervisor sends it before it kills a process that hangs."""
    import faulthandler
    import signal

    faulthandler.register(signal.SIGQUIT, all_threads=True)


def volunteer(adjustment: int) -> None:
    """Raises the kernel's OOM score of this process, so that processes that cost more to replace outlive it."""
    try:
        with open("/proc/self/oom_score_adj", "r+") as file:  # "r+" does not create the file
            before = int(file.read())
            file.seek(0)
            file.write(str(min(1000, before + adjustment)))
    except (OSError, ValueError):
        if os.name != "posix":
            raise
