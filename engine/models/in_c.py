"""Which operations the C program (`kernels/cpu/program.c`) has. Torch computes the others on the same memory.

`executors/native.py` compiles by this table, and the configuration, the operator's notes and docs/models.md follow it,
so they cannot differ. Imports without torch."""

from ...kernels.cpu.limits import attention_lacks
from .program import Args, Attend, Glu, Program


def lacks(args: Args) -> str | None:
    """What C lacks to compute an operation, in the field's words; None: it has the operation."""
    match args:
        case Attend(relative=relative) if relative is not None:
            return "attention with relative positions"
        case Attend(reach=reach) if reach.kind == "cross":
            return "cross-attention"
        case Attend():
            what = attention_lacks(args.head_dim, args.value_dim)
            return None if what is None else f"attention with {what}"
        case Glu(ranks=ranks) if ranks > 1:
            return "sparse gates over several ranks"
    return None


def operations_in_torch(program: Program) -> tuple[str, ...]:
    """What C lacks of a program, each once."""
    found = (lacks(op.args) for op in program.ops)
    return tuple(dict.fromkeys(each for each in found if each is not None))


def attends_in_c(program: Program) -> bool:
    """Whether C has the attention of all layers: then its results do not depend on other rows."""
    return all(lacks(args) is None for args in program.attention)
