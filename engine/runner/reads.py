"""The bytes of its weights that a step reads: for the roof that the memory's bandwidth gives. Plain arithmetic."""

from collections.abc import Callable
from dataclasses import replace

from ...ipc.messages import PassReads
from ..models.program import Embed, Matrix, Mixture, Positions, Program


def reads_of(program: Program, bytes_of: Callable[[Matrix], int], vectors: int) -> PassReads:
    """What a rank reads of a program's weights in a step, without those of an encoder, which reads a prompt once.
    bytes_of: of a matrix as it lies in memory, of a stack with the slots of replicas, which are empty at first and then
    save other ranks work. vectors: bytes of all of them. A step reads a few rows of a table, but all of one that is
    also the head."""
    if program.encoder is not None:
        program = replace(program, encoder=None)
    mixtures = [op.args for op in program.ops if isinstance(op.args, Mixture)]
    stacks = {stack.key: args for args in mixtures for stack in (args.gate_up, args.down)}
    tables = {op.args.table.key for op in program.ops if isinstance(op.args, Embed | Positions)}
    if program.has_head:
        tables.discard(program.head.key)
    sizes = {matrix.key: bytes_of(matrix) for matrix in program.matrices}
    experts = sum(sizes[key] * args.down.experts // args.num_slots for key, args in stacks.items())
    fixed = sum(size for key, size in sizes.items() if key not in stacks and key not in tables)
    share = max((min(1.0, args.router.top_k / args.num_experts) for args in mixtures), default=0.0)
    return PassReads(fixed + vectors, experts, share)
