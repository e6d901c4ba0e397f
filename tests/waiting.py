"""How tests wait for a state that no event announces: they poll it, and the error at the deadline names it.

No test sleeps a fixed time or compares clocks; `test_waiting.py` checks this.
"""

import asyncio
import contextlib
import signal
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

SLOW_DISK_S = 300.0  # until threads have written what a test needs, at half a second a file

T = TypeVar("T")
_FIRST_PAUSE_S = 0.0005
_LONGEST_PAUSE_S = 0.02


def until(condition: Callable[[], T], what: str | Callable[[], str], timeout_s: float = 30.0) -> T:
    """The first true value of `condition`. `what`: names the awaited state in the error at the deadline."""
    for pause_s in _pauses(what, timeout_s):
        if answer := condition():
            return answer
        time.sleep(pause_s)
    raise AssertionError


async def until_async(condition: Callable[[], T], what: str | Callable[[], str], timeout_s: float = 30.0) -> T:
    """`until` for an event loop, which keeps running."""
    for pause_s in _pauses(what, timeout_s):
        if answer := condition():
            return answer
        await asyncio.sleep(pause_s)
    raise AssertionError


@contextlib.contextmanager
def cpu_deadline(seconds: float) -> Iterator[None]:
    """Fails if the block takes more CPU time of this process, which does not depend on other processes. For work in C;
    `counting.lines_of` counts work in Python."""

    def fail(*_: object) -> None:
        raise AssertionError(f"not within {seconds} s of CPU time")

    before = signal.signal(signal.SIGPROF, fail)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def _pauses(what: str | Callable[[], str], timeout_s: float) -> Iterator[float]:
    """Pauses, short at first for events that take microseconds. Raises after the deadline."""
    deadline, pause_s = time.monotonic() + timeout_s, _FIRST_PAUSE_S
    while time.monotonic() < deadline:
        yield pause_s
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
    yield 0.0  # one last check after the deadline, even if this process did not run meanwhile
    raise AssertionError(f"not within {timeout_s} s: {what if isinstance(what, str) else what()}")
