"""The defaults on a CPU depend on facts about the machine; with these, each default is tested on every machine.

`MachineFacts` of tests come from PAGEWIRE_MACHINE, which real processes inherit.
"""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from pagewire.config.machine import OVERRIDES
from pagewire.kernels.cpu.build import compiler

COMPILED = "C kernels"
TORCH = "torch"
NARROW = "torch in bfloat16"  # too little memory to widen the checkpoint: tokens may depend on the batch

_FACTS: dict[str, dict[str, object]] = {
    COMPILED: {"has_compiler": True},
    TORCH: {"has_compiler": False, "memory_bytes": 1 << 40},
    NARROW: {"has_compiler": False, "memory_bytes": 1 << 20},
}
DEFAULTS = [
    pytest.param(COMPILED, marks=pytest.mark.skipif(compiler() is None, reason="no C compiler")),
    pytest.param(TORCH, marks=[pytest.mark.long] if compiler() else []),
    pytest.param(NARROW, marks=pytest.mark.long),
]


@contextmanager
def machine(name: str) -> Iterator[None]:
    """A context in which started processes get these facts about the machine."""
    facts = json.loads(os.environ.get(OVERRIDES, "{}")) | _FACTS[name]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(OVERRIDES, json.dumps(facts))
        yield
