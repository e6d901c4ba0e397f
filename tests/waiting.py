"""How tests wait for what no event tells: they ask again and again, and a deadline says what did not come.

No test sleeps a fixed time or compares clocks; `test_waiting.py` looks for it.
"""

import asyncio
import contextlib
import signal
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

T = TypeVar("T")
_FIRST_PAUSE_S = 0.0005
_LONGEST_PAUSE_S = 0.02


def until(condition: Callable[[], T], what: str | Callable[[], str], timeout_s: float = 10.0) -> T:
    """The first true value that `condition` gives. `what` is awaited, or what to say when it did not come."""
    for pause_s in _pauses(what, timeout_s):
        if answer := condition():
            return answer
        time.sleep(pause_s)
    raise AssertionError


async def until_async(condition: Callable[[], T], what: str | Callable[[], str], timeout_s: float = 10.0) -> T:
    """`until`, on a loop that goes on meanwhile."""
    for pause_s in _pauses(what, timeout_s):
        if answer := condition():
            return answer
        await asyncio.sleep(pause_s)
    raise AssertionError


@contextlib.contextmanager
def cpu_deadline(seconds: float) -> Iterator[None]:
    """Fails when what stands within takes more time of this process's cores, which no other process makes longer. For
    work that is done in C; `counting.lines_of` counts that of Python."""

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
    """Short at first, for what comes in microseconds; raises after the deadline."""
    deadline, pause_s = time.monotonic() + timeout_s, _FIRST_PAUSE_S
    while time.monotonic() < deadline:
        yield pause_s
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
    yield 0.0  # the last look is after the deadline, however late this process was
    raise AssertionError(f"not within {timeout_s} s: {what if isinstance(what, str) else what()}")
