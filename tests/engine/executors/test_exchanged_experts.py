"""Experts that ranks with tokens of their own share out give the bits of one rank with all of them: in C over shared
memory, and in torch over gloo. The ranks are real processes."""

import ctypes
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from rank_processes import run_ranks, this_part
from torch import Tensor

from pagewire.config.machine import machine_facts
from pagewire.engine.attention.kv_cache import KvShape
from pagewire.engine.executors import native
from pagewire.engine.executors.experts import mixture, route
from pagewire.engine.executors.native import NativeModel
from pagewire.engine.executors.reference import Reference, Step
from pagewire.engine.executors.registers import Registers
from pagewire.engine.executors.vocabulary import Vocabulary
from pagewire.engine.executors.weights import Weights
from pagewire.engine.models.description import Part, Router, Weight
from pagewire.engine.models.expert_places import holder_table, places
from pagewire.engine.models.program import Matrix, Mixture, Op, Program, Use, View
from pagewire.engine.parallel.collectives import Alone, GlooGroup, Group, SharedMemoryGroup, join
from pagewire.engine.parallel.domains import Domain
from pagewire.ipc.messages import StepPlan
from pagewire.kernels.cpu import build
from pagewire.kernels.cpu.library import Kernels
from pagewire.kernels.cpu.operations import native_ops
from pagewire.kernels.cpu.structs import StepFields

HIDDEN, INNER, NUM, TOP_K = 96, 48, 5, 3
SLOTS = ((0, 1), (2, 3), (4, 0))  # of each rank; the last one has a replica
# Of each rank, in some steps. What is sent of the most is more than the memory between ranks holds at once.
STEPS = ((37, 0, 5), (1, 1, 1), (0, 0, 2), (900, 41, 7))
NONE = Weight((), HIDDEN)
_STACKS: tuple[tuple[str, int, int, Use], ...] = (
    ("gate_up", 2 * INNER, HIDDEN, "gated experts"),
    ("down", HIDDEN, INNER, "experts"),
)
ROUTERS = {
    "weights of results": Router(NONE, TOP_K, renorm=True),
    "weights of inputs": Router(NONE, TOP_K, "sigmoid", on="input"),
    "experts that return their input": Router(NONE, TOP_K, zero_experts=2, rounds_weights=False),
}

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not machine_facts().has_compiler, reason="without the C kernels bits depend on the batch"),
]


@dataclass(frozen=True)
class Tokens:
    """Of a rank in a step."""

    x: Tensor  # [tokens, hidden]
    logits: Tensor  # [tokens, experts of the router]
    positions: Tensor  # [tokens] int64

    @staticmethod
    def of(step: int, rank: int, router: Router) -> "Tokens":
        generator, num = torch.Generator().manual_seed(100 * step + rank), STEPS[step][rank]
        return Tokens(
            torch.randn((num, HIDDEN), generator=generator),
            torch.randn((num, NUM + router.zero_experts), generator=generator),
            torch.randint(0, 50, (num,), generator=generator),
        )


def mixture_of(router: Router, experts: tuple[int, ...]) -> tuple[Mixture, Weights]:
    """Of a rank with some of the experts. In torch, too, the products are those of C, whose bits do not depend on the
    batch."""
    ops, weights = native_ops(Kernels(build.find().load())), Weights()
    matrices = []
    for expert in range(NUM):
        generator = torch.Generator().manual_seed(expert)
        gate_up = torch.randn((2 * INNER, HIDDEN), generator=generator) / HIDDEN**0.5
        matrices.append((ops.gated(gate_up), ops.matrix(torch.randn((HIDDEN, INNER), generator=generator) / 7)))
    stacks = zip(*(matrices[expert] for expert in experts), strict=True)
    weights.matrices = dict(zip(("gate_up", "down"), stacks, strict=True))
    gate_up, down = (
        Matrix(name, (Weight((Part("w", rows),), columns, experts=len(experts), only=experts),), use)
        for name, rows, columns, use in _STACKS
    )
    return Mixture(router, NUM, gate_up, down, "silu", 0.0), weights


class Rank:
    """One mixture of experts as a program, of a rank of a group, or of one with all experts."""

    def __init__(self, router: Router, group: Group) -> None:
        is_alone = group.size == 1
        args, weights = mixture_of(router, tuple(range(NUM)) if is_alone else SLOTS[group.rank])
        if not is_alone:
            args = replace(args, places=places(NUM, SLOTS, group.rank), is_exchanged=True)
        self._x, self._logits, self._out = (
            View(number, 0, width) for number, width in enumerate((HIDDEN, NUM + router.zero_experts, HIDDEN))
        )
        self._op = Op(0, args, (self._x, self._logits), (self._out,))
        widths = tuple(view.width for view in (self._x, self._logits, self._out))
        program = Program(
            (self._op,), widths, self._out, Matrix("head", ()), None, 1.0, 0.0, None, (), HIDDEN, 8, has_head=False
        )
        self._domain = None if is_alone else Domain(group.rank)
        cpu, float32 = torch.device("cpu"), torch.float32
        self._reference = Reference(
            program, weights, max_len=64, dtype=float32, weight_dtype=float32, device=cpu, group=group,
            domain=self._domain,
        )  # fmt: skip
        self.load = torch.zeros(0)
        if not is_alone:
            experts = self._reference.own_experts[0]
            assert experts.holders is not None
            experts.holders.copy_(torch.tensor(holder_table(NUM, SLOTS, router.zero_experts)))
            self.load = experts.load
        self._kernels = Kernels(build.find().load())
        vocabulary = Vocabulary(program, weights, group)
        self._model = NativeModel(self._reference, vocabulary, KvShape(layers=(), dtype=float32), self._kernels)
        compiled = native._Compiler(self._reference, self._model._layout, None, self._kernels)
        self._kept, self._parts = compiled, compiled.parts()  # there is no attention

    def run(self, step: int, tokens: Tokens) -> Tensor:
        """[tokens, hidden], in C unless the ranks use gloo."""
        if self._domain is not None:
            self._domain.begin(StepPlan(step, (), b"", b"", b"", b"", b"", domain_tokens=STEPS[step]))
        num, fields, registers = len(tokens.x), StepFields(), Registers()
        (part,) = self._parts
        if isinstance(part, native._InTorch):
            if num:
                registers.put(self._x, HIDDEN, tokens.x)
                registers.put(self._logits, self._logits.width, tokens.logits)
            self._reference.run(part.op, registers, Step(tokens.positions, tokens.positions, None, tokens.positions))
            return registers.get(self._out)
        self._model._make_room(num, fields)
        fields.tokens, fields.positions = num, tokens.positions.data_ptr()
        registers = self._model._registers(num)
        registers.get(self._x).copy_(tokens.x)
        registers.get(self._logits).copy_(tokens.logits)
        self._kernels.program(ctypes.addressof(part.operations), 1, ctypes.addressof(fields))
        return registers.get(self._out).clone()


def take_part() -> None:
    """A rank's process."""
    torch.set_num_threads(1)
    part = this_part()
    shared, gloo = join(part.info, part.size, torch.device("cpu")), GlooGroup(part.info, part.size)
    assert isinstance(shared, SharedMemoryGroup)
    with torch.inference_mode():
        for router in ROUTERS.values():
            whole, weights = mixture_of(router, tuple(range(NUM)))
            alone = Rank(router, Alone())
            for group in (shared, gloo):
                rank, num = Rank(router, group), 0
                for step in range(len(STEPS)):
                    tokens = Tokens.of(step, part.info.rank, router)
                    found = rank.run(step, tokens)
                    expected = alone.run(step, tokens)
                    if group is gloo and len(expected):
                        torch.testing.assert_close(found, expected)
                        expected = mixture(whole, weights, tokens.x, tokens.logits)
                    assert torch.equal(found, expected), (router, group, step)
                    num += int((route(router, tokens.logits, None)[1] < NUM).sum()) if len(tokens.x) else 0
                nums = group.all_gather(torch.stack((rank.load.sum(), torch.tensor(num)))).sum(0)
                assert nums[0] == nums[1] > 0 and rank.load.all(), "each choice is computed once; the replica has some"
    torch.distributed.destroy_process_group()  # its threads would abort a process that ends before them


def test_ranks_with_tokens_of_their_own(tmp_path: Path) -> None:
    run_ranks(__file__, len(SLOTS), tmp_path)


if __name__ == "__main__":
    take_part()
