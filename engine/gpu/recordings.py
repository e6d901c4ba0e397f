"""Recorded work (CUDA graphs) by shape. A shape runs unrecorded until the device is idle enough to record it, or for
good if recording fails."""

import logging
from collections.abc import Callable, Hashable, Iterable

from ...errors import StartError
from ..device.queue import Queue, Work

_log = logging.getLogger(__name__)
_OFTEN = 3  # a shape is recorded after this many unrecorded runs, even if the device is never idle


class Recordings:
    """The recordings of one queue."""

    def __init__(
        self,
        queue: Queue,
        work: Callable[[Hashable], Work],
        planned: Iterable[Hashable],
        *,
        is_strict: bool = False,
    ) -> None:
        """work: the work of a shape. planned: shapes to record in idle time, after those that were run. is_strict: a
        shape that cannot be recorded raises StartError."""
        self._is_strict = is_strict
        self._queue = queue
        self._work = work
        self._recorded: dict[Hashable, Work] = {}
        self._failed: set[Hashable] = set()  # shapes that could not be recorded
        self._runs: dict[Hashable, int] = {}  # of shapes that are not recorded
        self._wanted = tuple(planned)
        self._planned = dict.fromkeys(self._wanted)

    @property
    def num_recorded(self) -> int:
        return len(self._recorded)

    def run(self, shape: Hashable) -> None:
        recorded = self._recorded.get(shape)
        if recorded is not None:
            recorded()
            return
        self._work(shape)()
        if shape in self._failed:
            return
        runs = self._runs[shape] = self._runs.get(shape, 0) + 1
        if runs == _OFTEN:
            self._record(shape)

    def forget(self) -> None:
        """Drops all recordings, whose memory is about to be freed. Every shape is to be recorded again."""
        self._recorded.clear()
        self._failed.clear()
        self._runs.clear()
        self._planned = dict.fromkeys(self._wanted)

    def next_shape(self) -> Hashable | None:
        """The next shape to record: the one that was run most, then the planned ones."""
        if self._runs:
            return max(self._runs, key=self._runs.__getitem__)
        return next(iter(self._planned), None)

    def record(self, shape: Hashable) -> None:
        """Runs a shape once, which loads its kernels, and records it. The buffers must hold a valid step. Errors of the
        run are raised; errors of the recording are logged, since the shape can run without it."""
        self._work(shape)()
        self._record(shape)

    def _record(self, shape: Hashable) -> None:
        self._runs.pop(shape, None)
        self._planned.pop(shape, None)
        try:
            self._recorded[shape] = self._queue.record(self._work(shape))
        except (RuntimeError, MemoryError) as error:  # of CUDA and torch; the step's own work has run
            self._failed.add(shape)
            why = str(error).partition("\n")[0]
            if self._is_strict:
                raise StartError(
                    f"--strict-kernels: a step of shape {shape} cannot be recorded as a CUDA graph: {why}. Without the "
                    "flag it runs without one, which is slower."
                ) from error
            _log.warning("A step of shape %s cannot be recorded and runs without a CUDA graph: %s", shape, why)
