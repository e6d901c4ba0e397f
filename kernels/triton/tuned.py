"""Options of launches that were measured to be the best. `python -m pagewire.bench.gpu.tune --write` writes the table.

What is not in it goes by the rules in the kernels' own files. The table is part of the program: the order of a sum
follows from it, so it must be the same wherever the same bits are wanted, and nothing is measured while requests wait.
"""

TUNED: dict[tuple[str, tuple[int, ...]], dict[str, int]] = {}
"""(kernel, what its options depend on) → options that differ from the rule. Empty until someone has measured."""


def tuned(kernel: str, *bucket: int, **rule: int) -> dict[str, int]:
    """The options of `rule`, as they are in the table where they are in it."""
    found = TUNED.get((kernel, bucket), {})
    return {name: found.get(name, value) for name, value in rule.items()}
