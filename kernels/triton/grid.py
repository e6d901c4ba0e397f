"""Compiles the kernels for the head sizes, types and architectures that programs may ask for, without a GPU, and keeps
`limits.json`, the table of what came out. `limits.py` reads it, and `engine/gpu/rules.py` refuses by it.

    python -m pagewire.kernels.triton.grid                  compiles everything and compares with the table
    python -m pagewire.kernels.triton.grid --shard 3/40     only the third of 40 parts (counted from 0)
    python -m pagewire.kernels.triton.grid --write          compiles everything and writes the table
    python -m pagewire.kernels.triton.grid --write --shard 3/40    replaces a part of the table
    python -m pagewire.kernels.triton.grid --write --missing       adds what the table lacks, if --write was ended

A cell is a kernel with a size and types. `VARIANTS` (see `compile.py`) are the shapes of a few models, with plans of
what the code must look like; cells are all shapes that fit or do not, with no plan. Cells are worse than the table if
they fit on fewer devices, take more shared memory, spill more, or lose their tensor cores.
"""

import argparse
import json
import math
import os
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import torch
import triton
from torch import Tensor

from ..states import Tiles
from .compile import compiled, disassembled, sources_key
from .decode_attention import decode_attention, workspace_decode
from .extend_attention import extend_attention
from .fp8_product import fp8_product
from .gated_norm import gated_norm
from .int4_product import int4_product
from .latent_attention import write_latent
from .limits import COMPILED, PATH, Made, Table, cell_name, read_table
from .moe import moe, workspace_moe
from .norm_rotary_write import norm_rotary_write
from .product import product
from .rms_norm import rms_norm
from .scans import StateTable, conv, scan_delta, scan_lightning, scan_mamba1, scan_mamba2
from .silu_mul import silu_mul
from .small_product import small_product, workspace_small_product
from .variant import shaped

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
_HEAD_DIMS = {"bfloat16": (16, 32, 64, 128, 256), "float16": (256,), "float32": (64, 128, 256)}
"""A head of another size needs no more than the next larger one, and float16 no more than bfloat16."""
_RANK = 512  # of latents; no described model has another
_ROPE_DIM, _BLOCK = 64, 64
_FP8 = torch.float8_e4m3fn
_ROWS = 16
_KEPT = 12  # the table is written after so many
_ERROR_LENGTH = 120  # characters of a compiler's error that the table keeps
_TENSOR_CORES = re.compile(r"\b((?:H|HG|QG|OM|IM|UTC\w*)MMA)\b")
_QUOTED = re.compile(r"Error\([\"'](.*?)[.\"']")
_SPILLS = re.compile(r"\b(?:STL|LDL)\b")

Launches = Callable[[], None]


@dataclass(frozen=True, kw_only=True)
class Cell:
    """Launches whose kernels depend on a size and on types in the same way."""

    name: str  # of `cell_name`
    launch: Launches


def cells() -> tuple[Cell, ...]:
    """The kernels of attention by head dimension, of latents by rank, of products by the columns of a tile, of experts
    by the rows of a block, of scans by the numbers of a key, and of others by their width."""
    found: list[Cell] = []

    def add(kernel: str, size: int, dtype: str, launch: Launches, kv_dtype: str = "") -> None:
        found.append(Cell(name=cell_name(kernel, size, dtype, kv_dtype), launch=launch))

    for name, dtype in DTYPES.items():
        is_bf16, is_wide = name == "bfloat16", name == "float32"
        for size in _HEAD_DIMS[name]:
            for kv_name, kv in ((name, dtype), *((("fp8", _FP8),) if is_bf16 else ())):
                add("decode_attention", size, name, partial(_decode, size, 0, dtype, kv), kv_name)
                add("extend_attention_128", size, name, partial(_extend, size, 0, dtype, kv, 128), kv_name)
                if is_bf16:
                    add("norm_rotary_write", size, name, partial(_norm_rotary_write, size, dtype, kv), kv_name)
            for rows in (16, 64) if is_bf16 or is_wide else ():
                add(f"extend_attention_{rows}", size, name, partial(_extend, size, 0, dtype, dtype, rows))
        if not (is_bf16 or is_wide):
            continue
        for columns, n, k in ((16, 1024, 2048), (32, 4096, 1024), (64, 151936, 1024)):  # see `small_product.tiling`
            add("small_product", columns, name, partial(_small_product, n, k, dtype))
        for rows in (16, 64, 128) if is_bf16 else ():
            add("fp8_product", rows, name, partial(_fp8_product, rows, dtype))
            add("int4_product", rows, name, partial(_int4_product, rows, dtype))
        add("latent_decode", _RANK, name, partial(_decode, _RANK, _ROPE_DIM, dtype, dtype))
        for rows in (16, 128):
            add(f"latent_extend_{rows}", _RANK, name, partial(_extend, _RANK, _ROPE_DIM, dtype, dtype, rows))
        for block, tokens in ((16, 16), (64, 1024), (128, 8192)):  # see `moe._tiles`
            add(f"moe_{block}", block, name, partial(_moe, tokens, dtype))
        for kind, size in (("delta", 128), ("mamba2", 128), ("mamba2", 256), ("lightning", 128)):
            add(f"scan_{kind}", size, name, partial(_scan, kind, size, dtype))
        for columns, n in ((32, 1024), (128, 28672)):  # see `product._options`
            add("product", columns, name, partial(_product, n, 1024, dtype))
    for name, launch in (("norm_rotary_write 128", partial(_norm_rotary_write, 128)), ("rms_norm 1024", _rms_norm),
                         ("silu_mul 4096", _silu_mul), ("gated_norm 256", _gated_norm), ("conv 8192", _conv),
                         ("scan_mamba1 16", _scan_mamba1), ("latent_write 512", _write_latent)):  # fmt: skip
        kernel, _, width = name.partition(" ")
        of = (torch.float32, torch.float32) if kernel == "norm_rotary_write" else (torch.bfloat16,)
        add(kernel, int(width), "float32" if len(of) > 1 else "bfloat16", partial(launch, *of))
    return tuple(found)


# Launches. Heads, rows and widths do not change what a kernel needs, unless they are the cell's size.


def _pages(dim: int, rope: int, kv: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """rope: numbers of a key beyond its values; 0: values have pages of their own."""
    pages = shaped(4, 1 if rope else 2, _BLOCK, dim + rope, dtype=kv)
    return pages, None if rope else pages


def _decode(dim: int, rope: int, dtype: torch.dtype, kv: torch.dtype) -> None:
    query, (k_pages, v_pages) = shaped(_ROWS, 16, dim, dtype=dtype), _pages(dim, rope, kv)
    kv_heads = k_pages.shape[1]
    workspace = workspace_decode(
        rows=256, max_context=32768, heads=16, kv_heads=kv_heads, head_dim=dim, num_programs=396, device="meta"
    )
    decode_attention(
        query, query, k_pages, v_pages, shaped(_ROWS, 33, dtype=torch.int32), workspace, scale=1.0,
        query_rope=shaped(_ROWS, 16, rope, dtype=dtype) if rope else None,
    )  # fmt: skip


def _extend(dim: int, rope: int, dtype: torch.dtype, kv: torch.dtype, rows: int) -> None:
    query, (k_pages, v_pages) = shaped(_ROWS, 16, dim, dtype=dtype), _pages(dim, rope, kv)
    table, lens, work = (shaped(_ROWS, *shape, dtype=torch.int32) for shape in ((33,), (), (4,)))
    extend_attention(
        query, query, k_pages, v_pages, table, lens, work, scale=1.0, num_programs=396, tile_rows=rows,
        query_rope=shaped(_ROWS, 16, rope, dtype=dtype) if rope else None,
    )  # fmt: skip


def _norm_rotary_write(dim: int, dtype: torch.dtype, kv: torch.dtype) -> None:
    slots, norm, pages = shaped(_ROWS, dtype=torch.int32), shaped(dim, dtype=dtype), shaped(4, 8, 64, dim, dtype=kv)
    norm_rotary_write(
        shaped(_ROWS, 32 * dim, dtype=dtype), (norm, norm), 1e-6, shaped(1000, dim, dtype=torch.float32), slots, slots,
        shaped(_ROWS, 16, dim, dtype=dtype), pages, pages,
    )  # fmt: skip


def _write_latent(dtype: torch.dtype) -> None:
    rank = _RANK
    whole, slots = shaped(_ROWS, rank + _ROPE_DIM, dtype=dtype), shaped(_ROWS, dtype=torch.int32)
    write_latent(whole[:, :rank], whole[:, rank:], shaped(4, 1, _BLOCK, rank + _ROPE_DIM, dtype=dtype), slots)


def _small_product(n: int, k: int, dtype: torch.dtype) -> None:
    """With and without a norm, with a residual or gates."""
    x, weight, workspace = (
        shaped(4, k, dtype=dtype),
        shaped(n, k, dtype=dtype),
        workspace_small_product([(n, k)], "meta"),
    )
    out = shaped(4, n, dtype=dtype)
    small_product(x, weight, out, workspace, residual=out)
    half = shaped(4, n // 2, dtype=dtype)
    small_product(x, weight, half, workspace, norm=(shaped(k, dtype=dtype), 1e-6), is_gated=True)


def _product(n: int, k: int, dtype: torch.dtype) -> None:
    x, weight = shaped(64, k, dtype=dtype), shaped(n, k, dtype=dtype)
    product(x, weight, shaped(64, n, dtype=dtype))
    product(x, weight, shaped(64, n // 2, dtype=dtype), is_gated=True)


def _fp8_product(rows: int, dtype: torch.dtype) -> None:
    x, weight = shaped(rows, 4096, dtype=dtype), shaped(4096, 4096, dtype=_FP8)
    fp8_product(x, weight, shaped(32, 32, dtype=torch.float32), shaped(rows, 4096, dtype=dtype))
    fp8_product(x, weight, shaped(4096, dtype=torch.float32), shaped(rows, 4096, dtype=dtype))


def _int4_product(rows: int, dtype: torch.dtype) -> None:
    for group in (32, 128):
        scales, zeros = shaped(4096 // group, 4096, dtype=torch.float16), shaped(4096 // group, 4096, dtype=torch.uint8)
        x, packed = shaped(rows, 4096, dtype=dtype), shaped(4096, 2048, dtype=torch.uint8)
        int4_product(x, packed, scales, zeros, shaped(rows, 4096, dtype=dtype), half=min(64, group))


def _moe(tokens: int, dtype: torch.dtype) -> None:
    num_experts, top_k, hidden, inter = 8, 2, 2048, 768
    workspace = workspace_moe(
        max_tokens=tokens, num_experts=num_experts, top_k=top_k, hidden=hidden, inter=inter, dtype=dtype, device="meta"
    )
    x, logits = shaped(tokens, hidden, dtype=dtype), shaped(tokens, num_experts, dtype=dtype)
    gate_up = shaped(num_experts, 2 * inter, hidden, dtype=dtype)
    down = shaped(num_experts, hidden, inter, dtype=dtype)
    moe(x, x, logits, gate_up, down, shaped(1, dtype=torch.int32), workspace, top_k=top_k, renormalize=True)


def _states(units: int, words: int, *, is_long: bool) -> tuple[StateTable, Tiles]:
    """Rows of one page each."""
    memory, place = shaped(64, units * words * 4, dtype=torch.uint8), shaped(4096, dtype=torch.int32)
    tiles = Tiles(shaped(units, dtype=torch.int32), shaped(units, dtype=torch.int64), 1)
    return StateTable(memory=memory, place=place, num_rows=_ROWS, num_pages=1, is_long=is_long), tiles


def _scan(kind: str, size: int, dtype: torch.dtype) -> None:
    """By steps and by chunks."""
    tokens, heads, values = 1600, 32, min(size, 128)

    def numbers(*shape: int) -> Tensor:
        return shaped(*shape, dtype=dtype)

    def vector(*shape: int) -> Tensor:
        return shaped(*shape, dtype=torch.float32)

    for is_long in (False, True):
        states = _states(heads, size * values, is_long=is_long)
        q, k, v = numbers(tokens, 16, size), numbers(tokens, 16, size), numbers(tokens, heads, values)
        if kind == "delta":
            scan_delta(q, k, v, numbers(tokens, heads), numbers(tokens, heads), vector(heads), vector(heads), *states)
        elif kind == "mamba2":
            weights = vector(heads), vector(heads), vector(heads)
            scan_mamba2(v, k, q, numbers(tokens, heads), *weights, (0.0, math.inf), *states)
        else:
            scan_lightning(q, k, v, vector(heads), *states)


def _scan_mamba1(dtype: torch.dtype) -> None:
    x, dt, b, c = (shaped(_ROWS, width, dtype=dtype) for width in (8192, 8192, 16, 16))
    a, dt_bias, d = (shaped(*shape, dtype=torch.float32) for shape in ((512, 16, 16), (8192,), (8192,)))
    scan_mamba1(x, dt, b, c, a, dt_bias, d, *_states(512, 16 * 16, is_long=False))


def _conv(dtype: torch.dtype) -> None:
    weight = shaped(4, 8192, dtype=torch.float32)
    conv(shaped(_ROWS, 8192, dtype=dtype), weight, None, "silu", *_states(1, 3 * 8192, is_long=False))


def _rms_norm(dtype: torch.dtype) -> None:
    x = shaped(_ROWS, 1024, dtype=dtype)
    rms_norm(x, shaped(1024, dtype=dtype), 1e-6, x, x)


def _silu_mul(dtype: torch.dtype) -> None:
    silu_mul(shaped(_ROWS, 8192, dtype=dtype), shaped(_ROWS, 4096, dtype=dtype), interleaved=True)


def _gated_norm(dtype: torch.dtype) -> None:
    x = shaped(_ROWS, 4096, dtype=dtype)
    gated_norm(x, x, shaped(256, dtype=torch.float32), 256, 1e-6, "silu", False)


# The table


def made_of(cell: Cell, architecture: int) -> Made:
    """What the compiler makes of a cell's kernels."""
    try:
        files = [of for _, of in compiled(cell.launch, architecture)]
    except Exception as error:  # the compiler may raise anything, and the table says what
        lines = [line for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
        found = _QUOTED.search(lines[-1])  # Triton wraps what its front end raises
        return Made(0, 0, 0, "", (found[1] if found else lines[-1]).strip()[:_ERROR_LENGTH])
    shared, stack, spills, cores = 0, 0, 0, Counter[str]()
    for of in files:
        _, bytes_of_stack, sass = disassembled(of[".cubin"])
        shared = max(shared, json.loads(of[".json"].read_text())["shared"])
        stack = max(stack, bytes_of_stack)
        spills = max(spills, len(_SPILLS.findall(sass)))
        cores.update(_TENSOR_CORES.findall(sass))
    return Made(shared, stack, spills, " ".join(f"{name} {number}" for name, number in sorted(cores.items())))


def jobs(shard: tuple[int, int] = (0, 1)) -> tuple[tuple[int, int], ...]:
    """(index of a cell, architecture) of a part. Neighbours go to different parts, so that all take about as long."""
    part, parts = shard
    every = [(number, architecture) for architecture in COMPILED for number in range(len(cells()))]
    return tuple(every[part::parts])


def worse(made: Made, before: Made, architecture: int, *, same_compiler: bool) -> str:
    """How a cell is worse than the table, or better at what the table refuses; empty: it is not."""
    if bool(made.misfit(architecture)) != bool(before.misfit(architecture)):
        now, then = (each.misfit(architecture) or "runs" for each in (made, before))
        return f"{now}; in the table it {then}"
    if made.error or not same_compiler:
        return ""
    if before.tensor_cores and not made.tensor_cores:
        return f"no tensor cores; {before.tensor_cores} in the table"
    for name in ("shared", "stack"):
        if getattr(made, name) > getattr(before, name):
            return f"{getattr(made, name):,} bytes of {name}; {getattr(before, name):,} in the table"
    return ""


def _make(job: tuple[int, int]) -> Made:
    number, architecture = job
    return made_of(cells()[number], architecture)


def _all_made(todo: Sequence[tuple[int, int]], *, processes: int) -> Iterator[Made]:
    if processes == 1:
        yield from map(_make, todo)
        return
    with ProcessPoolExecutor(processes, get_context("fork")) as pool:  # see `compile.py`
        yield from pool.map(_make, todo, chunksize=4)


def written(table: Table) -> str:
    """The text of limits.json: a line for each cell, in the order of their names."""
    rows = []
    for name, of in sorted(table.items()):
        numbers = {str(each): of[each][: 5 if of[each].error else 4] for each in sorted(of)}
        rows.append(f"  {json.dumps(name)}: {json.dumps(numbers)}")
    head = {"triton": triton.__version__, "sources": sources_key(), "cells": {}}
    return json.dumps(head, indent=1).replace('"cells": {}', '"cells": {\n' + ",\n".join(rows) + "\n }") + "\n"


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m pagewire.kernels.triton.grid")
    parser.add_argument("--write", action="store_true", help="write the table")
    parser.add_argument("--missing", action="store_true", help="compile only what the table lacks")
    parser.add_argument("--shard", default="0/1", metavar="N/PARTS", help="compile only the N-th part, from 0")
    parser.add_argument("--table", type=Path, default=PATH, help="default: %(default)s")
    processes = len(os.sched_getaffinity(0))
    parser.add_argument("--processes", type=int, default=processes, help="default: one for each core")
    options = parser.parse_args(arguments)
    part, _, parts = options.shard.partition("/")
    todo, every = jobs((int(part), int(parts))), cells()
    text = options.table.read_text() if options.table.exists() else '{"triton": "", "cells": {}}'
    known, same_compiler = read_table(text), json.loads(text)["triton"] == triton.__version__
    if options.missing:
        todo = tuple(job for job in todo if job[1] not in known.get(every[job[0]].name, {}))
    names = {cell.name for cell in every}
    kept = known if options.missing or parts != "1" else {}
    taken = {name: {a: made for a, made in of.items() if a in COMPILED} for name, of in kept.items() if name in names}
    num_worse = 0
    for (number, architecture), made in zip(todo, _all_made(todo, processes=options.processes), strict=True):
        name = every[number].name
        taken.setdefault(name, {})[architecture] = made
        if options.write and sum(map(len, taken.values())) % _KEPT == 0:
            options.table.write_text(written(taken))
        before = known.get(name, {}).get(architecture)
        if before is None or options.write:
            why = "" if options.write else "not in the table"
        else:
            why = worse(made, before, architecture, same_compiler=same_compiler)
        num_worse += bool(why)
        print(
            f"{'WORSE: ' if why else ''}{name} sm_{architecture}: {why or made.misfit(architecture) or made}",
            flush=True,
        )
    print(f"{len(todo)} compiled with triton {triton.__version__}, {num_worse} worse than the table")
    if options.write:
        options.table.write_text(written(taken))
    elif num_worse:
        print("After a deliberate change write the table again: python -m pagewire.kernels.triton.grid --write")
    return 1 if num_worse else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
