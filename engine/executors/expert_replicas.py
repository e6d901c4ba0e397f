"""Further copies of experts that many tokens choose, while the model serves.

A rank has slots for some replicas in each layer (`--expert-replicas`). `ExpertReplicas.place` reads what a rank's slots
lack from the checkpoint, and then changes the table by which choices find their slots. All ranks with the layer do so
between the same two plans, and only if all could read theirs, so each choice is computed exactly once.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Protocol

import torch

from ...errors import PagewireError
from ...kernels.ops import Matrix as PackedMatrix
from ..models.description import Weight
from ..models.expert_places import holder_table, places, table
from ..models.program import Matrix, Mixture, Program, Vector
from ..parallel.collectives import Group
from ..weights.loader import Sink
from .experts import OwnExperts
from .native import NativeModel
from .weights import Options, Packing, Weights

log = logging.getLogger(__name__)

Read = Callable[[Sequence[Matrix | Vector], Sink], None]
"""Fills some matrices and vectors from the checkpoint. Raises a PagewireError or OSError."""
ReadInto = Callable[[Sink], None]
"""Fills one expert's matrices and vectors, which have the keys of the layer's stacks. Raises as `Read`."""
Put = Callable[[], None]


class Slots(Protocol):
    """A rank's memory for the experts of its layers."""

    def prepare(self, layer: int, args: Mixture, slot: int, read: ReadInto) -> Put:
        """Reads an expert. The returned call puts it into a slot. Raises what `read` raises."""


class ExpertReplicas:
    def __init__(self, program: Program, slots: Slots, own: Mapping[int, OwnExperts], group: Group, read: Read) -> None:
        """own: by layer."""
        self._mixtures = {op.layer: op.args for op in program.ops if isinstance(op.args, Mixture) and op.args.places}
        self._slots, self._own, self._group, self._read = slots, own, group, read

    def place(self, layer: int, slots: tuple[tuple[int, ...], ...]) -> bool:
        """slots: of each rank of the stage. False: a rank could not read what it lacks; then nothing changes on any.
        The ranks of another stage do nothing."""
        if layer not in self._mixtures:
            return True
        args, own = self._mixtures[layer], self._own[layer]
        wanted = slots[self._group.rank]
        puts: list[Put] = []
        problem = ""
        try:
            for slot, expert in enumerate(wanted):
                if expert not in (-1, own.experts[slot]):
                    read = partial(self._read, _targets(args, expert))
                    puts.append(self._slots.prepare(layer, args, slot, read))
        except (PagewireError, OSError) as error:
            problem = str(error)
        is_ready = torch.tensor([not problem], dtype=torch.float32, device=own.places.device)
        if not self._group.all_gather(is_ready).all():
            log.warning("layer %d keeps its experts: %s", layer, problem or "another rank could not read a replica")
            return False
        own.flush_load()
        for put in puts:
            put()
        own.experts[:] = wanted
        rows = table(places(args.num_experts, slots, self._group.rank), args.num_slots, args.router.zero_experts)
        own.places.copy_(torch.tensor(rows, dtype=torch.int32))
        if own.holders is not None:
            where = holder_table(args.num_experts, slots, args.router.zero_experts)
            own.holders.copy_(torch.tensor(where, dtype=torch.int32))
        return True


class HostSlots:
    """Of the executors on CPUs, which hold a matrix for each expert."""

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

    def prepare(self, layer: int, args: Mixture, slot: int, read: ReadInto) -> Put:
        packing = Packing(self._options)
        read(packing)
        return partial(self._put, layer, args, slot, packing.weights)

    def _put(self, layer: int, args: Mixture, slot: int, read: Weights) -> None:
        found: list[PackedMatrix] = []
        for matrix in (args.gate_up, args.down):
            stack = list(self._weights.matrices[matrix.key])
            (stack[slot],) = read.matrices[matrix.key]
            found.append(stack[slot])
            self._weights.matrices[matrix.key] = tuple(stack)
        for bias in _biases(args):
            self._weights.vectors[bias.key][slot] = read.vectors[bias.key][0]
        if self.native is not None:
            self.native.replace_expert(layer, slot, *found)


def _targets(args: Mixture, expert: int) -> list[Matrix | Vector]:
    """What a layer's expert consists of."""
    targets: tuple[Matrix | Vector, ...] = (args.gate_up, args.down, *_biases(args))
    return [replace(each, weights=tuple(_only(weight, expert) for weight in each.weights)) for each in targets]


def _biases(args: Mixture) -> tuple[Vector, ...]:
    return tuple(bias for bias in (args.gate_up_bias, args.down_bias) if bias is not None)


def _only(weight: Weight, expert: int) -> Weight:
    other = None if weight.other is None else _only(weight.other, expert)
    return replace(weight, experts=1, only=(expert,), other=other)
