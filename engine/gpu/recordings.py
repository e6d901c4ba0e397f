"""Recorded work by shape. A shape runs as it is until it was recorded, which is done when nothing else is to do."""

from collections.abc import Callable, Hashable, Iterable

from ..device.queue import Queue, Work

_OFTEN = 3  # a shape that ran so often without a record gets one, even if the device is never idle


class Recordings:
    """Of one queue."""

    def __init__(self, queue: Queue, work: Callable[[Hashable], Work], planned: Iterable[Hashable]) -> None:
        """work: of a shape. planned: shapes to record unasked, in this order; those that were run come first."""
        self._queue = queue
        self._work = work
        self._recorded: dict[Hashable, Work] = {}
        self._runs: dict[Hashable, int] = {}  # of shapes without a record
        self._wanted = tuple(planned)
        self._planned = dict.fromkeys(self._wanted)

    @property
    def num_recorded(self) -> int:
        return len(self._recorded)

    def run(self, shape: Hashable) -> None:
        """Does the work of the shape."""
        recorded = self._recorded.get(shape)
        if recorded is not None:
            recorded()
            return
        self._work(shape)()
        runs = self._runs[shape] = self._runs.get(shape, 0) + 1
        if runs == _OFTEN:
            self._record(shape)

    def forget(self) -> None:
        """What was recorded works on memory that is about to go. Everything is to be recorded again."""
        self._recorded.clear()
        self._runs.clear()
        self._planned = dict.fromkeys(self._wanted)

    def next_shape(self) -> Hashable | None:
        """What to record next: of the shapes that were run, the one that was run most."""
        if self._runs:
            return max(self._runs, key=self._runs.__getitem__)
        return next(iter(self._planned), None)

    def record(self, shape: Hashable) -> None:
        """Runs a shape for its kernels' sake and records it. What it runs on must allow for that."""
        self._work(shape)()
        self._record(shape)

    def _record(self, shape: Hashable) -> None:
        self._runs.pop(shape, None)
        self._planned.pop(shape, None)  # also if there is no memory for it: it is not tried again unasked
        self._recorded[shape] = self._queue.record(self._work(shape))
