"""Further copies of experts that many tokens choose, while the model serves.

A rank has slots for some replicas in each layer (`--expert-replicas`). `ExpertReplicas.place` reads what a rank's slots
lack from the checkpoint, and then changes the table by which choices find their slots. All ranks do so between the same
two plans, and only if all could read theirs, so each choice is computed exactly once.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch

from ...errors import PagewireError
from ...kernels.ops import Matrix as PackedMatrix
from ..executors.experts import OwnExperts
from ..executors.native import NativeModel
from ..executors.weights import Options, Packing, Weights
from ..models.description import Weight
from ..models.expert_places import holder_table, places, table
from ..models.program import Matrix, Mixture, Program, Vector
from ..parallel.collectives import Group

log = logging.getLogger(__name__)

Read = Callable[[Sequence[Matrix | Vector], Packing], None]
"""Fills some matrices and vectors from the checkpoint. Raises a PagewireError or OSError."""


class ExpertReplicas:
    def __init__(
        self,
        program: Program,
        weights: Weights,
        own: Mapping[int, OwnExperts],
        group: Group,
        options: Options,
        read: Read,
    ) -> None:
        """Makes room in `weights`: until a slot gets an expert, it has the matrices of the first one. own: by layer."""
        self._mixtures = {op.layer: op.args for op in program.ops if isinstance(op.args, Mixture) and op.args.places}
        self._weights, self._own, self._group, self._options, self._read = weights, own, group, options, read
        self.native: NativeModel | None = None  # whose C program points to the matrices
        for args in self._mixtures.values():
            for matrix in (args.gate_up, args.down):
                stack = weights.matrices[matrix.key]
                weights.matrices[matrix.key] = (*stack, *[stack[0]] * args.num_replicas)
            for bias in filter(None, (args.gate_up_bias, args.down_bias)):
                values = weights.vectors[bias.key]
                weights.vectors[bias.key] = torch.cat((values, values[:1].expand(args.num_replicas, -1)))

    def place(self, layer: int, slots: tuple[tuple[int, ...], ...]) -> bool:
        """slots: of each rank. False: a rank could not read what it lacks; then nothing changes on any."""
        args, own = self._mixtures[layer], self._own[layer]
        wanted = slots[self._group.rank]
        read: dict[int, Weights] = {}
        problem = ""
        try:
            for slot, expert in enumerate(wanted):
                if expert not in (-1, own.experts[slot]):
                    read[slot] = self._of_expert(args, expert)
        except (PagewireError, OSError) as error:
            problem = str(error)
        is_ready = self._group.all_gather(torch.tensor([not problem], dtype=torch.float32))
        if not is_ready.all():
            log.warning("layer %d keeps its experts: %s", layer, problem or "another rank could not read a replica")
            return False
        own.flush_load()
        for slot, weights in read.items():
            self._take(layer, args, slot, weights)
        own.experts[:] = wanted
        rows = table(places(args.num_experts, slots, self._group.rank), args.num_slots, args.router.zero_experts)
        own.places.copy_(torch.tensor(rows, dtype=torch.int32))
        if own.holders is not None:
            where = holder_table(args.num_experts, slots, args.router.zero_experts)
            own.holders.copy_(torch.tensor(where, dtype=torch.int32))
        return True

    def _of_expert(self, args: Mixture, expert: int) -> Weights:
        def only(target: Matrix | Vector) -> Matrix | Vector:
            return replace(target, weights=tuple(_only(weight, expert) for weight in target.weights))

        targets = [
            only(each) for each in (args.gate_up, args.down, args.gate_up_bias, args.down_bias) if each is not None
        ]
        packing = Packing(self._options)
        self._read(targets, packing)
        return packing.weights

    def _take(self, layer: int, args: Mixture, slot: int, read: Weights) -> None:
        found: list[PackedMatrix] = []
        for matrix in (args.gate_up, args.down):
            stack = list(self._weights.matrices[matrix.key])
            (stack[slot],) = read.matrices[matrix.key]
            found.append(stack[slot])
            self._weights.matrices[matrix.key] = tuple(stack)
        for bias in filter(None, (args.gate_up_bias, args.down_bias)):
            self._weights.vectors[bias.key][slot] = read.vectors[bias.key][0]
        if self.native is not None:
            self.native.replace_expert(layer, slot, *found)


def _only(weight: Weight, expert: int) -> Weight:
    other = None if weight.other is None else _only(weight.other, expert)
    return replace(weight, experts=1, only=(expert,), other=other)
