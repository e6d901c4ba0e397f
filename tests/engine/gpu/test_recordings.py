"""Shapes that are recorded, and shapes whose recording fails."""

import logging

import pytest
import torch

from pagewire.engine.device.queue import EagerQueue
from pagewire.engine.gpu.recordings import Recordings
from pagewire.errors import StartError


class _FullQueue(EagerQueue):
    """Cannot record the work of some shapes."""

    def __init__(self, error: Exception | None) -> None:
        super().__init__(torch.device("cpu"))
        self.error = error
        self.num_tries = 0

    def record(self, work):
        self.num_tries += 1
        if self.error is not None:
            raise self.error
        return super().record(work)


def recordings(queue, planned=()):
    """With the list of shapes whose work ran."""
    ran: list[object] = []
    return Recordings(queue, lambda shape: lambda: ran.append(shape), planned), ran


def test_a_shape_is_recorded_after_three_runs():
    queue = _FullQueue(None)
    recorded, ran = recordings(queue)
    for _ in range(5):
        recorded.run("a")
    assert (recorded.num_recorded, queue.num_tries, ran) == (1, 1, ["a"] * 5)


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("CUDA out of memory."), RuntimeError("operation not permitted when capturing")]
)
def test_a_shape_that_cannot_be_recorded_runs_unrecorded(error, caplog):
    """The step whose recording failed has run, and later ones run without trying again."""
    queue = _FullQueue(error)
    recorded, ran = recordings(queue, planned=("a", "b"))
    with caplog.at_level(logging.WARNING):
        for _ in range(9):
            recorded.run("a")
    assert (recorded.num_recorded, queue.num_tries, ran) == (0, 1, ["a"] * 9)
    assert str(error) in caplog.text
    assert recorded.next_shape() == "b"
    recorded.record("b")
    assert recorded.next_shape() is None
    queue.error = None
    recorded.forget()  # as before sleep, which makes room
    for _ in range(3):
        recorded.run("a")
    assert recorded.num_recorded == 1


def test_a_shape_that_cannot_be_recorded_ends_a_strict_start():
    queue, ran = _FullQueue(RuntimeError("operation not permitted when capturing\nmore")), []
    strict = Recordings(queue, lambda shape: lambda: ran.append(shape), ("a",), is_strict=True)
    with pytest.raises(StartError, match=r"a step of shape a cannot be recorded .*: operation not permitted when cap"):
        strict.record("a")
