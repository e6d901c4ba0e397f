"""Decode steps beside other programs: the worker's step alone, while processes that only spin use the same cores.

A fair system leaves half of the throughput to as many threads as there are busy foreign ones. Less is lost by threads
that wait for each other.

python -m pagewire.bench.engine.busy --model build/peers/qwen3-0.6b --rows 32
"""

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from ...config.flags import make_config
from ...engine.runner.runner import Runner
from ...procs.prepare import prepare
from ..report import Row, machine, print_table, write_json
from .step import opened, plan

_SPIN = "print(flush=True)\nwhile True: pass"
_STEPS = 32  # between two prompts, so that the context stays about the same


@contextmanager
def foreign_threads(count: int) -> Iterator[None]:
    """Processes of one thread that spin, each bound to a core, the same number on each."""
    cores = sorted(os.sched_getaffinity(0))
    children: list[subprocess.Popen[bytes]] = []
    try:
        for index in range(count):
            child = subprocess.Popen([sys.executable, "-c", _SPIN], stdout=subprocess.PIPE)
            children.append(child)
            os.sched_setaffinity(child.pid, {cores[index % len(cores)]})
        for child in children:
            assert child.stdout is not None
            child.stdout.readline()
        yield
    finally:
        for child in children:
            child.kill()
            child.communicate()


class Steps:
    """Decode steps of `rows` rows whose contexts start at `context` positions."""

    def __init__(self, runner: Runner, rows: int, context: int, vocab_size: int) -> None:
        self._runner = runner
        self._rows = list(range(rows))
        self._opens = [opened(row, context, context + _STEPS + 1, vocab_size) for row in self._rows]
        self._context = context
        self._num_steps = 0

    def tokens_per_s(self, seconds: float) -> float:
        """Computes steps until they have taken that long, prompts not counted."""
        taken, steps = 0.0, 0
        while taken < seconds:
            for row in self._rows:
                self._run([row], [self._context], row)
            started = time.perf_counter()
            for _ in range(_STEPS):
                self._run(self._rows, [1] * len(self._rows))
                steps += 1
                if (now := time.perf_counter() - started) + taken > seconds:
                    break
            taken += now
        return steps * len(self._rows) / taken

    def _run(self, rows: Sequence[int], counts: Sequence[int], opens: int | None = None) -> None:
        self._num_steps += 1
        self._runner.launch(plan(self._num_steps, rows, counts, () if opens is None else (self._opens[opens],)))
        self._runner.collect()


def main(argv: Sequence[str] | None = None) -> None:
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("--model", default="", help="a folder (default: the demo model)")
    flags.add_argument("--rows", type=int, default=16, help="(default: %(default)s)")
    flags.add_argument("--context", type=int, default=64, help="positions of a prompt (default: %(default)s)")
    flags.add_argument(
        "--foreign", nargs="+", type=int, default=[1, 2, 4], help="numbers of busy threads (default: %(default)s)"
    )
    flags.add_argument("--seconds", type=float, default=2.0, help="of steps in each turn (default: %(default)s)")
    flags.add_argument("--repeat", type=int, default=5, help="turns (default: %(default)s)")
    flags.add_argument("--threads", type=int, default=0)
    flags.add_argument("--dtype", default="auto")
    flags.add_argument("--quantization", choices=["int8"])
    flags.add_argument("--json", type=Path, default=Path("bench/results/busy.json"), help="(default: %(default)s)")
    given = flags.parse_args(argv)
    facts = machine()
    config = prepare(
        make_config(
            model=given.model,
            dtype=given.dtype,
            threads=given.threads,
            quantization=given.quantization,
            max_model_len=given.context + _STEPS + 1,
            kv_cache_memory=1 << 30,
        )
    )
    runner = Runner.load(config)
    runner.open_cache(runner.offer())
    steps = Steps(runner, given.rows, given.context, config.model.vocab_size)
    steps.tokens_per_s(0.5)  # warm up
    table = {count: Row(f"beside {count} busy threads" if count else "alone") for count in (0, *given.foreign)}
    for _ in range(given.repeat):
        for count, row in table.items():
            with foreign_threads(count):
                row.add(**{"tokens/s": steps.tokens_per_s(given.seconds)})
            row.add(**{"of alone, %": 100 * row.figures["tokens/s"][-1] / table[0].figures["tokens/s"][-1]})
    runner.close()
    rows = list(table.values())
    print(f"{config.model.name}, {given.rows} rows, {config.num_threads} threads on {facts['cores']} cores")
    print_table(rows)
    settings = {key: value for key, value in vars(given).items() if key != "json"}
    write_json(
        given.json,
        "decode steps beside other programs",
        rows,
        facts,
        settings | {"model": config.model.name, "num_threads": config.num_threads},
    )


if __name__ == "__main__":
    main()
