"""Which kernels run on which GPUs: the table `limits.json`, which `grid.py` writes from what the compiler made of every
kernel for every head size, type and architecture. No Triton here: `pagewire doctor` asks on machines without it.

A kernel does not run where the compiler refuses it, or where it takes more shared memory than a program can have.
"""

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import NamedTuple

PATH = Path(__file__).with_name("limits.json")
MAX_SHARED = {80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 120: 99}
"""KiB of shared memory per program."""
COMPILED = (89, 90, 100, 80, 120)
"""The architectures of the table, those first for which `_AS` has no other."""
_AS = {80: (80, 89), 86: (80, 89), 89: (89, 80), 90: (90,), 100: (100,), 120: (120, 89, 80)}
"""Which entry of a cell counts. Triton makes the same for sm_80, 86, 89 and 120, up to the assembler and to fp8, which
sm_80 and 86 do not have: cells of fp8 have an entry of sm_80."""

ATTENTION = ("decode_attention", "extend_attention_16", "extend_attention_64", "extend_attention_128",
             "norm_rotary_write")  # fmt: skip
LATENT = ("latent_decode", "latent_extend_16", "latent_extend_128", "latent_write")
EXPERTS = ("moe_16", "moe_64", "moe_128")
SMALL_PRODUCT, INVARIANT_PRODUCT = (16, 32, 64), (32, 128)  # the sizes of their cells


class Made(NamedTuple):
    """What the compiler made of the kernels of a cell: the most of any of them."""

    shared: int  # bytes per program
    stack: int  # bytes per thread
    spills: int  # instructions that store to the stack or load from it
    tensor_cores: str  # instructions of tensor cores in SASS, such as "HMMA 32"; empty: none
    error: str = ""  # why the compiler refuses the kernel

    def misfit(self, architecture: int) -> str:
        """Why it does not run, as the end of a sentence; empty: it runs."""
        if self.error:
            return f"does not compile for sm_{architecture} ({self.error})"
        most = 1024 * MAX_SHARED[architecture]
        if self.shared > most:
            return f"needs {self.shared:,} bytes of shared memory, and sm_{architecture} has {most:,}"
        return ""


Table = Mapping[str, Mapping[int, Made]]
"""By the name of a cell, then by architecture."""


def cell_name(kernel: str, size: int, dtype: str, kv_dtype: str = "") -> str:
    """kv_dtype: counts if it is not dtype."""
    return " ".join((kernel, str(size), dtype, *((kv_dtype,) if kv_dtype not in ("", dtype) else ())))


def read_table(text: str) -> Table:
    cells = json.loads(text)["cells"]
    return {name: {int(each): Made(*made) for each, made in of.items()} for name, of in cells.items()}


@cache
def table() -> Table:
    """The shipped table."""
    return read_table(PATH.read_text())


def misfit(kernel: str, size: int, architecture: int, dtype: str, kv_dtype: str = "", of: Table | None = None) -> str:
    """Why a device cannot run a kernel, as the end of a sentence; empty: it can, or the table does not know.

    size: the head dimension, or what else a kernel depends on (see `grid.py`); without a cell of this size the next
    larger one counts, and without one of float16 that of bfloat16. architecture: 90 for sm_90; one that is not in the
    table counts as the next older one. of: the table; None: the shipped one."""
    of = table() if of is None else of
    known = max((each for each in MAX_SHARED if each <= architecture), default=None)
    if known is None:
        return f"is written for sm_80 and newer, and this device is sm_{architecture}"
    sizes = sorted({int(name.split()[1]) for name in of if name.split()[0] == kernel})
    for each in (each for each in sizes if each >= size):
        for types in ((dtype, kv_dtype), (dtype,), *((("bfloat16",),) if dtype == "float16" else ())):
            name = cell_name(kernel, each, *types)
            made = [of[name][entry] for entry in _AS[known] if name in of and entry in of[name]]
            if made:
                return made[0].misfit(known)
    return ""
