"""What the stages of a pipeline hand each other on GPUs, without the host and outside of recorded work: before a pass
what the stage before has computed, after it what the next one needs, and from the last stage to the first the sampled
ids.

A transfer has a stream for its direction and memory of its own here, so it runs beside the passes. Those wait for it
where they need it: a pass for its input, a copy into the memory of a transfer for the transfer before, and in the first
stage a pass for the ids of its rows. Both sides know from the plan whether there is a transfer, and how large it is.
"""

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...ipc.messages import StageSeconds
from ...kernels.triton.prepare_step import remember_sampled
from ..device.queue import Mark, Queue
from ..parallel.ring import Ring
from .decoder import TritonDecoder
from .packet import Limits, Packet
from .shapes import StepShape
from .state import RowState

_ALIGNED = 4  # int32: arrays that kernels read begin at a multiple of 16 bytes


class _Asked(NamedTuple):
    """Ids that the first stage does not know yet. All tensors are [samples] int32, in step order."""

    number: int  # of the step
    ids: Tensor
    rows: Tensor
    positions: Tensor  # in the output
    arrived: Mark


class _Wait(NamedTuple):
    what: Literal["input", "ids", "output"]
    begun: Mark
    ended: Mark


class Waits:
    """Of one step for other stages."""

    def __init__(self, begun: Mark) -> None:
        self.begun, self.ready = begun, begun  # before the first wait, and after the one for input or ids
        self.all: list[_Wait] = []


class Handover:
    """One stage's side. Calls come in the order of the plans, and each stage makes those for the same plans."""

    def __init__(
        self,
        ring: Ring,
        *,
        queue: Queue,
        decoder: TritonDecoder,
        state: RowState,
        limits: Limits,
        dtype: torch.dtype,
        is_first: bool,
        num_in_flight: int,
    ) -> None:
        """is_first: stage; whether it is the last one, the program says. num_in_flight: plans at most."""
        self._ring, self._queue, self._decoder, self._state = ring, queue, decoder, state
        self.is_first, self.is_last = is_first, decoder.is_last
        tokens, samples = limits.tokens, -(-limits.samples // _ALIGNED) * _ALIGNED

        def integers(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=queue.device)

        # Of one transfer in each direction.
        self._received = torch.zeros((tokens, decoder.received_width), dtype=dtype, device=queue.device)
        self._sent = torch.zeros((tokens, decoder.sent_width), dtype=dtype, device=queue.device)
        self._sent_ids = integers(samples if self.is_last else 0)
        self._read: Mark | None = None  # after the last copy from `_received`
        self._sending: Mark | None = None
        # In the first stage, by a step's number modulo the plans in flight: ids, rows, positions.
        self._of_steps = integers(num_in_flight if is_first else 0, 3, samples)
        self._asked: deque[_Asked] = deque()
        self._num_asked = 0
        self._asked_in: NDArray[np.int64] = np.full(limits.rows, -1)  # the number of the last step that samples a row
        self._part = limits.part
        self._waits = Waits(queue.mark())  # of the last step that has begun
        self._seconds = dict.fromkeys(("busy", "input", "ids", "output"), 0.0)  # of steps that have ended

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in (self._received, self._sent, self._sent_ids, self._of_steps))

    def begin(self, shape: StepShape, num_tokens: int, rows: NDArray[np.int64]) -> Waits:
        """Before a pass: later work of the queue waits for what it needs. rows: those whose first id is the one that
        they sampled last. Returns what the step waits for, which `ended` takes."""
        waits = self._waits = Waits(self._queue.mark())
        if self.is_first:
            newest = int(self._asked_in[rows].max(initial=-1))
            while self._asked and self._asked[0].number <= newest:
                self._take_ids()
            waits.ready = waits.all[-1].ended if waits.all else waits.begun
            return waits
        into = self._received[:num_tokens]
        arrived = self._queue.transfer(
            lambda: self._ring.receive(into), after=self._read or self._queue.mark(), is_sent=False
        )
        with self._timed("input"):
            self._queue.follow(arrived)
        waits.ready = waits.all[-1].ended
        self._decoder.put_received(self._received[: shape.tokens])
        self._read = self._queue.mark()
        return waits

    def end(self, shape: StepShape, num_tokens: int) -> None:
        """After the pass of a stage before the last one."""
        out = self._sent[:num_tokens]
        self._wait_for_the_last_one()
        self._decoder.take_sent(shape, out)
        self._send(out)

    def ask(self, packet: Packet, rows: NDArray[np.int64]) -> None:
        """After a pass of the first stage. rows: those that the last stage samples, [samples] in step order."""
        num, number = len(rows), self._num_asked
        memory = self._of_steps[number % len(self._of_steps), :, :num]
        if len(self._asked) == len(self._of_steps):  # the core has the result of the oldest one
            self._take_ids()
        ids, own_rows, positions = memory.unbind()
        after = self._queue.mark()  # the kernel that read the ids of an earlier step here has run
        arrived = self._queue.transfer(lambda: self._ring.receive(ids), after=after, is_sent=False)
        for first, part in zip(range(0, num, self._part), packet.parts, strict=False):
            own_rows[first : first + self._part].copy_(part.rows[: min(self._part, num - first)])
        positions.copy_(self._state.sample_positions[:num])
        self._asked.append(_Asked(number, ids, own_rows, positions, arrived))
        self._asked_in[rows] = number
        self._num_asked += 1

    def _take_ids(self) -> None:
        """Keeps the oldest ids for the next passes. A row that was opened since gets an id that nothing reads."""
        asked, state = self._asked.popleft(), self._state
        with self._timed("ids"):
            self._queue.follow(asked.arrived)
        remember_sampled(state.last_ids, state.last_positions, asked.ids, asked.positions, asked.rows)

    def send_ids(self, num: int) -> None:
        """After the samples of the last stage, if there are any."""
        out = self._sent_ids[:num]
        self._wait_for_the_last_one()
        out.copy_(self._state.sampled[:num])
        self._send(out)

    def _wait_for_the_last_one(self) -> None:
        if self._sending is not None:
            with self._timed("output"):
                self._queue.follow(self._sending)

    @contextmanager
    def _timed(self, what: Literal["input", "ids", "output"]) -> Iterator[None]:
        """The queue waits within the context."""
        begun = self._queue.mark()
        yield
        self._waits.all.append(_Wait(what, begun, self._queue.mark()))

    def ended(self, waits: Waits, done: Mark) -> None:
        """The step of these waits has ended, at `done`."""
        busy = done.ms_since(waits.begun) / 1000
        for wait in waits.all:
            seconds = wait.ended.ms_since(wait.begun) / 1000
            self._seconds[wait.what] += seconds
            busy -= seconds
        self._seconds["busy"] += max(0.0, busy)

    def take_seconds(self) -> StageSeconds:
        """Of the steps that have ended since the last call."""
        found = StageSeconds(**self._seconds)
        self._seconds = dict.fromkeys(self._seconds, 0.0)
        return found

    def _send(self, out: Tensor) -> None:
        self._sending = self._queue.transfer(lambda: self._ring.send(out), after=self._queue.mark(), is_sent=True)

    def settle(self) -> None:
        """Waits for all transfers: their memory is about to move."""
        for mark in (self._sending, *(asked.arrived for asked in self._asked)):
            if mark is not None:
                mark.wait()
