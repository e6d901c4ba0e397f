"""Who is dead, who hangs, and when it has happened too often.

A death is seen by the process's end, a hang by silence: every process answers a `Ping` from the loop that does its
work. A worker may be silent for the length of a step, so as long as the kernel counts CPU time for it, it is only busy;
one that answers and completes nothing is stuck on its device.
"""

import os
from collections import deque
from pathlib import Path

from ..ipc.messages import Pong

STEP_LIMIT_S = 120.0  # one step of a large model on a slow CPU takes many seconds
STORM_DEATHS = 5  # more within STORM_S are no accidents
STORM_S = 60.0


class Liveness:
    """Over one process that is ready."""

    def __init__(self, pid: int, *, may_be_busy: bool, now: float) -> None:
        """`may_be_busy`: it does not answer while it works."""
        self._pid = pid
        self._may_be_busy = may_be_busy
        self._heard_at = now
        self._progress = -1
        self._progressed_at = now  # or had nothing to do
        self._cpu_ticks = -1
        self._cpu_at = now  # it last used some

    def heard(self, pong: Pong, now: float) -> None:
        """It has answered."""
        self._heard_at = self._cpu_at = now
        if pong.progress != self._progress or not pong.is_busy:
            self._progress = pong.progress
            self._progressed_at = now

    def excuse(self, now: float) -> None:
        """Nobody has listened for a while."""
        self._heard_at = self._cpu_at = self._progressed_at = now

    def complaint(self, hang_timeout_s: float, now: float) -> str | None:
        """Why it counts as hung, if it does."""
        if now - self._progressed_at > STEP_LIMIT_S:
            return f"has been at one step for {now - self._progressed_at:.0f} s"
        if self._may_be_busy and (ticks := _cpu_ticks(self._pid)) != self._cpu_ticks:
            self._cpu_ticks, self._cpu_at = ticks, now
        silent_s = now - (self._cpu_at if self._may_be_busy else self._heard_at)
        if silent_s > hang_timeout_s:
            return f"has said nothing for {silent_s:.1f} s"
        return None


def _cpu_ticks(pid: int) -> int:
    """User and system time that it has used; -1 where /proc does not tell."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return int(fields[11]) + int(fields[12])
    except (OSError, IndexError, ValueError):
        return -1


class Deaths:
    """Of one launch, the last ones."""

    def __init__(self) -> None:
        self._last: deque[tuple[float, str]] = deque()

    def add(self, name: str, cause: str, now: float) -> None:
        """One more."""
        self._last.append((now, f"{name} {cause}"))
        while self._last[0][0] < now - STORM_S:
            self._last.popleft()

    def __len__(self) -> int:
        return len(self._last)

    @property
    def are_a_storm(self) -> bool:
        """Replacing makes no sense any more."""
        return len(self._last) > STORM_DEATHS

    def summary(self) -> str:
        """What happened, for the operator."""
        lines = (f"  {at - self._last[-1][0]:6.1f} s  {what}" for at, what in self._last)
        return "\n".join([f"{len(self._last)} processes have died within {STORM_S:.0f} s:", *lines])


def dump_stacks_on_quit() -> None:
    """SIGQUIT prints where every thread of this process is: the supervisor asks before it kills one that hangs."""
    import faulthandler
    import signal

    faulthandler.register(signal.SIGQUIT, all_threads=True)


def volunteer(adjustment: int) -> None:
    """Has the kernel end this process rather than others when memory is short: it costs least to replace."""
    try:
        with open("/proc/self/oom_score_adj", "r+") as file:  # not a file to be made
            before = int(file.read())
            file.seek(0)
            file.write(str(min(1000, before + adjustment)))
    except (OSError, ValueError):
        if os.name != "posix":
            raise
