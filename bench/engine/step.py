"""The worker's step alone: no other process, no HTTP, no scheduler. It shows first what a kernel gains.

python -m pagewire.bench.engine.step --model build/peers/qwen3-0.6b --rows 1 32 --context 256 --prefill 128
"""

import argparse
import cProfile
import pstats
import time
from collections.abc import Sequence

import numpy as np

from ...config.flags import make_config
from ...engine.runner.runner import Runner
from ...ipc.messages import RowOpen, Sampling, StepPlan, ids_to_bytes
from ...procs.prepare import prepare
from ..report import Row, machine, print_table

_BLOCK = 16


def plan(step: int, rows: Sequence[int], counts: Sequence[int], opens: tuple[RowOpen, ...] = ()) -> StepPlan:
    """A plan in which every row computes its count of positions and samples."""
    return StepPlan(step, opens, b"", b"", ids_to_bytes(list(rows)), ids_to_bytes(list(counts)), bytes([1] * len(rows)))


def opened(row: int, num_prompt: int, max_len: int, vocab_size: int) -> RowOpen:
    """A row of random ids with blocks for `max_len` positions."""
    ids = np.random.default_rng(row).integers(min(300, vocab_size // 2), vocab_size, num_prompt)
    num_blocks = -(-max_len // _BLOCK)
    blocks = range(row * num_blocks, (row + 1) * num_blocks)
    return RowOpen(row, ids_to_bytes(ids.tolist()), num_prompt, 0, ids_to_bytes(list(blocks)), Sampling(temperature=0))


def main(argv: Sequence[str] | None = None) -> None:
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("--model", default="", help="a folder (default: the demo model)")
    flags.add_argument("--rows", nargs="+", type=int, default=[1, 8, 32], help="(default: %(default)s)")
    flags.add_argument(
        "--context", type=int, default=256, help="positions before the first step (default: %(default)s)"
    )
    flags.add_argument(
        "--prefill", nargs="*", type=int, default=[128], help="lengths of prompts, one step each (default: %(default)s)"
    )
    flags.add_argument("--steps", type=int, default=20, help="measured steps (default: %(default)s)")
    flags.add_argument("--threads", type=int, default=0)
    flags.add_argument("--quantization", choices=["int8", "int4"])
    flags.add_argument("--kv-cache-dtype", default="auto")
    flags.add_argument("--dtype", default="auto")
    flags.add_argument("--cpu-kernels", default="auto")
    flags.add_argument("--profile", action="store_true", help="print a profile of the decode steps")
    given = flags.parse_args(argv)
    max_len = given.context + given.steps + 8
    config = prepare(
        make_config(
            model=given.model,
            dtype=given.dtype,
            threads=given.threads,
            quantization=given.quantization,
            kv_cache_dtype=given.kv_cache_dtype,
            cpu_kernels=given.cpu_kernels,
            max_model_len=max(max_len, *given.prefill, 1),
            kv_cache_memory=4 << 30,
        )
    )
    started = time.perf_counter()
    runner = Runner.load(config)
    loaded = time.perf_counter() - started
    runner.open_cache(runner.offer())
    print(f"{machine()['cpu']}; {config.num_threads} threads; loaded in {loaded:.2f} s")
    for note in runner.notes:
        print(note)
    table = []
    step = 0

    def run(work: StepPlan) -> float:
        before = time.perf_counter()
        runner.launch(work)
        runner.collect()
        return (time.perf_counter() - before) * 1e3

    for num in given.prefill:
        row = Row(f"prompt of {num}")
        for _ in range(3):
            step += 1
            ms = run(plan(step, [0], [num], (opened(0, num, num, config.model.vocab_size),)))
            row.add(**{"ms": ms, "tokens/s": num / ms * 1e3})
        table.append(row)
    for num_rows in given.rows:
        rows = list(range(num_rows))
        for index in rows:
            step += 1
            run(plan(step, [index], [given.context], (opened(index, given.context, max_len, config.model.vocab_size),)))
        row = Row(f"decode, {num_rows} rows")
        profile = cProfile.Profile()
        for measured in [False] * 2 + [True] * given.steps:
            step += 1
            if measured and given.profile:
                profile.enable()
            ms = run(plan(step, rows, [1] * num_rows))
            profile.disable()
            if measured:
                row.add(**{"ms": ms, "tokens/s": num_rows / ms * 1e3})
        table.append(row)
        if given.profile:
            pstats.Stats(profile).sort_stats("tottime").print_stats(18)
    print_table(table)


if __name__ == "__main__":
    main()
