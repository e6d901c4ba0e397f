"""Launch options that were measured to be the best. `python -m pagewire.bench.gpu.tune --write` writes the table.

A launch without an entry follows the rule in its kernel's file. The table is part of the program because the order of
a sum follows from it: it must be the same on all machines that are to give the same bits, and requests never wait for a
measurement.
"""

TUNED: dict[tuple[str, tuple[int, ...]], dict[str, int]] = {}
"""(kernel, the sizes its options depend on) → options that differ from the rule. Empty until measured."""


def tuned(kernel: str, *bucket: int, **rule: int) -> dict[str, int]:
    """`rule` with the options that the table overrides."""
    found = TUNED.get((kernel, bucket), {})
    return {name: found.get(name, value) for name, value in rule.items()}
