"""Further copies of experts that many tokens choose, while the model serves.

A rank has slots for some replicas in each layer (`--expert-replicas`). `ExpertReplicas.read` reads what a rank's slots
lack from the checkpoint, on a thread, while steps go on. Once all ranks with the layer have read theirs, `place` puts
the experts into their slots and changes the table by which choices find them. All ranks do so between the same two
plans, and only if all have read theirs, so each choice is computed exactly once.

The thread calls no device, so it disturbs neither the order of a device's queue nor the recording of steps. It computes
alone, so it takes no turn of the threads that compute steps, and where processors are scarce it yields to them.
"""

import contextlib
import logging
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

import torch

from ...errors import PagewireError
from ...kernels.ops import Matrix as PackedMatrix
from ...kernels.reference import TorchMatrix
from ..models.description import Weight
from ..models.expert_places import holder_table, places, table
from ..models.program import Matrix, Mixture, Program, Vector
from ..parallel.collectives import Group
from ..weights.loader import Sink
from .experts import OwnExperts
from .native import NativeModel
from .weights import Options, Packing, Weights

log = logging.getLogger(__name__)

_NICE = 10  # added to the thread's nice value: steps get ten times its share of a processor

Wanted = tuple[Sequence[Matrix | Vector], Sink]
"""What an expert consists of, with the keys of the layer's stacks, and who takes it."""
Read = Callable[[Iterable[Wanted]], None]
"""Reads experts from the checkpoint. Raises a PagewireError or OSError."""
Put = Callable[[], None]


class Slots(Protocol):
    """A rank's memory for the experts of its layers."""

    def prepare(self, layer: int, args: Mixture, slot: int) -> tuple[Sink, Put]:
        """(takes an expert in the host's memory; then puts it into a slot). Only the sink is used by another
        thread."""

    def begin_thread(self) -> None:
        """Called once by the thread that reads. Its kernels use no other threads from then on."""


@dataclass(frozen=True)
class _Reading:
    layer: int
    slots: tuple[tuple[int, ...], ...]
    puts: Sequence[Put]  # once it is done
    done: Future[str]  # why not all could be read; empty: they were
    is_dropped: threading.Event


class ExpertReplicas:
    """All calls come from one thread."""

    def __init__(self, program: Program, slots: Slots, own: Mapping[int, OwnExperts], group: Group, read: Read) -> None:
        """own: by layer. read: called by another thread."""
        self._mixtures = {op.layer: op.args for op in program.ops if isinstance(op.args, Mixture) and op.args.places}
        self._slots, self._own, self._group, self._read = slots, own, group, read
        self._thread: ThreadPoolExecutor | None = None  # one, once something was read
        self._reading: _Reading | None = None  # until it is placed or dropped

    def read(self, layer: int, slots: tuple[tuple[int, ...], ...]) -> None:
        """Begins to read what this rank lacks of the layer. slots: of each rank of the stage, the expert of each slot;
        -1: none. Ranks of another stage lack nothing."""
        self.drop()
        wanted: list[Wanted] = []
        puts: list[Put] = []
        if (args := self._mixtures.get(layer)) is not None:
            held = self._own[layer].experts
            for slot, expert in enumerate(slots[self._group.rank]):
                if expert not in (-1, held[slot]):
                    sink, put = self._slots.prepare(layer, args, slot)
                    wanted.append((_targets(args, expert), sink))
                    puts.append(put)
        is_dropped = threading.Event()
        thread = self._started() if self._thread is None else self._thread
        done = thread.submit(self._read_all, layer, wanted, is_dropped)
        self._reading = _Reading(layer, slots, puts, done, is_dropped)

    def _started(self) -> ThreadPoolExecutor:
        self._thread = ThreadPoolExecutor(1, "experts")
        num_threads = torch.get_num_threads()
        self._thread.submit(self._begin_thread).result()
        torch.set_num_threads(num_threads)  # so that threads which begin later have it, too
        return self._thread

    def _begin_thread(self) -> None:
        """Runs on the thread, and takes no time."""
        self._slots.begin_thread()
        with contextlib.suppress(OSError):
            own = os.getpriority(os.PRIO_PROCESS, 0)  # of this thread, as of those that compute steps
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), min(19, own + _NICE))

    def _read_all(self, layer: int, wanted: Sequence[Wanted], is_dropped: threading.Event) -> str:
        """Runs on the thread."""
        try:
            with torch.inference_mode():
                if wanted:
                    self._read(_until(is_dropped, wanted))
        except (PagewireError, OSError) as error:
            log.warning("layer %d keeps its experts: %s", layer, error)
            return str(error) or type(error).__name__
        return ""

    @property
    def problem(self) -> str | None:
        """Why the last `read` failed; empty: it has not. None: it goes on, or there was none that was not placed or
        dropped. Raises what it has raised besides."""
        reading = self._reading
        return None if reading is None or not reading.done.done() else reading.done.result()

    def drop(self) -> None:
        """Forgets what was read and not placed. A read that goes on ends with the expert that it reads."""
        if self._reading is not None:
            self._reading.is_dropped.set()
            self._reading = None

    def place(self, layer: int, slots: tuple[tuple[int, ...], ...]) -> bool:
        """The ranks have these experts from now on. False: a rank has not read what it lacks; then nothing changes on
        any. The ranks of another stage do nothing."""
        reading, problem = self._reading, self.problem
        self.drop()
        if layer not in self._mixtures:
            return True
        args, own = self._mixtures[layer], self._own[layer]
        has_read = reading is not None and (reading.layer, reading.slots) == (layer, slots) and problem == ""
        is_ready = torch.tensor([has_read], dtype=torch.float32, device=own.places.device)
        if not self._group.all_gather(is_ready).all():
            log.warning("layer %d keeps its experts: a rank has not read its replicas", layer)
            return False
        assert reading is not None
        own.flush_load()
        for put in reading.puts:
            put()
        own.experts[:] = slots[self._group.rank]
        rows = table(places(args.num_experts, slots, self._group.rank), args.num_slots, args.router.zero_experts)
        own.places.copy_(torch.tensor(rows, dtype=torch.int32))
        if own.holders is not None:
            where = holder_table(args.num_experts, slots, args.router.zero_experts)
            own.holders.copy_(torch.tensor(where, dtype=torch.int32))
        return True

    def close(self) -> None:
        """Ends the thread."""
        self.drop()
        if self._thread is not None:
            self._thread.shutdown(cancel_futures=True)
            self._thread = None


class HostSlots:
    """Of the executors that hold a matrix for each expert."""

    def __init__(self, program: Program, weights: Weights, options: Options) -> None:
        """Makes room in `weights`: until a slot gets an expert, it has the matrices of the first one."""
        self._weights, self._options = weights, options
        self.native: NativeModel | None = None  # whose C program points to the matrices
        for args in (op.args for op in program.ops if isinstance(op.args, Mixture)):
            for matrix in (args.gate_up, args.down):
                stack = weights.matrices[matrix.key]
                weights.matrices[matrix.key] = (*stack, *[stack[0]] * args.num_replicas)
            for bias in _biases(args):
                values = weights.vectors[bias.key]
                weights.vectors[bias.key] = torch.cat((values, values[:1].expand(args.num_replicas, -1)))

    def prepare(self, layer: int, args: Mixture, slot: int) -> tuple[Sink, Put]:
        packing = Packing(replace(self._options, device=torch.device("cpu")))
        return packing, partial(self._put, layer, args, slot, packing.weights)

    def begin_thread(self) -> None:
        self._options.ops.compute_alone()

    def _put(self, layer: int, args: Mixture, slot: int, read: Weights) -> None:
        found: list[PackedMatrix] = []
        for matrix in (args.gate_up, args.down):
            stack = list(self._weights.matrices[matrix.key])
            stack[slot] = self._on_device(read.matrix(matrix))
            found.append(stack[slot])
            self._weights.matrices[matrix.key] = tuple(stack)
        for bias in _biases(args):
            self._weights.vectors[bias.key][slot] = read.vectors[bias.key][0]
        if self.native is not None:
            self.native.replace_expert(layer, slot, *found)

    def _on_device(self, matrix: PackedMatrix) -> PackedMatrix:
        """One that was read to the host. Other devices than CPUs have torch's kernels."""
        return TorchMatrix(matrix.weight.to(self._options.device)) if isinstance(matrix, TorchMatrix) else matrix


def _until(is_dropped: threading.Event, wanted: Sequence[Wanted]) -> Iterator[Wanted]:
    for each in wanted:
        if is_dropped.is_set():
            return
        yield each


def _targets(args: Mixture, expert: int) -> list[Matrix | Vector]:
    """What a layer's expert consists of."""
    targets: tuple[Matrix | Vector, ...] = (args.gate_up, args.down, *_biases(args))
    return [replace(each, weights=tuple(_only(weight, expert) for weight in each.weights)) for each in targets]


def _biases(args: Mixture) -> tuple[Vector, ...]:
    return tuple(bias for bias in (args.gate_up_bias, args.down_bias) if bias is not None)


def _only(weight: Weight, expert: int) -> Weight:
    other = None if weight.other is None else _only(weight.other, expert)
    return replace(weight, experts=1, only=(expert,), other=other)
