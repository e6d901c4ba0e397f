"""Runs the programs of an interpreted Triton kernel in a random order, as a GPU does.

One program runs at a time. At each atomic operation, barrier and store it waits, and another may continue. So a program
may see what any other has written so far, and a merge may find that others have not written yet. Even seeds choose any
program; odd ones prefer some programs to others, and seldom change their minds, so that some have ended before others
begin.
"""

import inspect
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

Index = tuple[int, int, int]
_SWITCHES = ("create_atomic_rmw", "create_atomic_cas", "create_barrier", "create_store", "create_masked_store")

_CHANGES = 0.05  # how often another program is preferred


class _EndedError(Exception):
    """Ends the programs that wait when one has failed."""


class _Program:
    def __init__(self, index: Index, work: Callable[[], object], back: threading.Semaphore) -> None:
        self.index = index
        self.is_done = False
        self.is_ended = False
        self.error: BaseException | None = None
        self._work, self._back = work, back
        self._go = threading.Semaphore(0)
        self._thread: threading.Thread | None = None

    def resume(self) -> None:
        """Runs it until it waits or is done."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, daemon=True)
            self._thread.start()
        else:
            self._go.release()
        self._back.acquire()

    def wait(self) -> None:
        """Called by the program itself."""
        self._back.release()
        self._go.acquire()
        if self.is_ended:
            raise _EndedError

    def end(self) -> None:
        self.is_ended = True
        if self._thread is not None and not self.is_done:
            self.resume()

    def _run(self) -> None:
        try:
            with np.errstate(all="ignore"):
                self._work()
        except BaseException as error:
            self.error = error
        self.is_done = True
        self._back.release()


class Schedule:
    """One order, which follows from the seed."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._is_fair = seed % 2 == 0
        self._current: _Program | None = None
        self.num_switches = 0

    def run(self, indexes: Sequence[Index], work: Callable[[], object], enter: Callable[[Index], None]) -> None:
        """Runs `work` for each index. enter: called with its index whenever a program continues."""
        back = threading.Semaphore(0)
        waiting = [_Program(index, work, back) for index in indexes]
        self._random.shuffle(waiting)
        while waiting:
            if not self._is_fair and self._random.random() < _CHANGES:
                waiting.append(waiting.pop(0))
            self._current = program = self._random.choice(waiting) if self._is_fair else waiting[0]
            enter(program.index)
            program.resume()
            if program.is_done:
                waiting.remove(program)
            if program.error is not None:
                for other in waiting:
                    other.end()
                raise program.error
        self._current = None

    def switch(self) -> None:
        if self._current is not None:
            self.num_switches += 1
            self._current.wait()


@contextmanager
def scheduled(seed: int, only: Callable[[Index], bool] = lambda index: True) -> Iterator[Schedule]:
    """Kernels that are launched inside run in the order of a seed. only: which programs run at all."""
    from triton.runtime import interpreter

    schedule, builder, executor = Schedule(seed), interpreter.interpreter_builder, interpreter.GridExecutor

    def launch(self: Any, *args: Any, **kwargs: Any) -> None:
        names = inspect.getfullargspec(self.fn).args
        values = inspect.getcallargs(self.fn, *args, **{name: kwargs[name] for name in kwargs if name in names})
        values = {k: v if k in self.constexprs else interpreter._implicit_cvt(v) for k, v in values.items()}
        grid = self.grid(values) if callable(self.grid) else self.grid
        x, y, z = (*grid, 1, 1)[:3]
        builder.set_grid_dim(x, y, z)
        every = ((i, j, k) for i in range(x) for j in range(y) for k in range(z))
        schedule.run(
            [index for index in every if only(index)], lambda: self.fn(**values), lambda i: builder.set_grid_idx(*i)
        )

    def switching(first: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            schedule.switch()
            result = first(*args, **kwargs)
            schedule.switch()
            return result

        return call

    first_launch = executor.__call__
    executor.__call__ = launch
    for name in _SWITCHES:
        setattr(builder, name, switching(getattr(builder, name)))
    try:
        yield schedule
    finally:
        executor.__call__ = first_launch
        for name in _SWITCHES:
            delattr(builder, name)
