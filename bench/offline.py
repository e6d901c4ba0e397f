"""Throughput without HTTP: `LLM.generate` with all prompts at once and one after another, beside transformers.

`python -m pagewire.bench.offline` prints a table (median, smallest and largest of the repetitions) and writes JSON.
"""

import argparse
import time
from collections.abc import Callable
from pathlib import Path

import torch

from ..engine.weights.source import locate
from ..llm import LLM, SamplingParams
from .report import Row, machine, print_table, repeat, write_json
from .workload import Transformers, prompts


def main(argv: list[str] | None = None) -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--model", default="", help="a folder or Hub name; empty: the demo model")
    parser.add_argument("--num-prompts", type=int, default=16, help="requests")
    parser.add_argument("--input-len", type=int, default=64, help="prompt tokens of each")
    parser.add_argument("--output-len", type=int, default=64, help="output tokens of each")
    parser.add_argument("--dtype", default="float32", choices=("bfloat16", "float32"), help="of weights and KV")
    parser.add_argument("--threads", type=int, default=1, help="torch threads, for everyone in the table")
    parser.add_argument("--repeat", type=int, default=5, help="repetitions")
    parser.add_argument("--json", type=Path, default=Path("bench/results/offline.json"), help="where to write")
    arguments = parser.parse_args(argv)
    folder, name = locate(arguments.model, None)
    facts = machine()
    num, length = arguments.num_prompts, arguments.output_len
    batch = prompts(folder, num, arguments.input_len)

    llm = LLM(str(folder), dtype=arguments.dtype, threads=arguments.threads, enable_prefix_caching=False)
    peer = Transformers(folder, arguments.dtype)
    torch.set_num_threads(arguments.threads)
    params = SamplingParams(temperature=0, max_tokens=length, ignore_eos=True)

    def one_by_one(generate: Callable[[list[list[int]]], None]) -> Callable[[], None]:
        def run() -> None:
            for prompt in batch:
                generate([prompt])

        return run

    def ours(some: list[list[int]]) -> None:
        llm.generate(some, params, use_tqdm=False)

    def theirs(some: list[list[int]]) -> None:
        peer.generate(some, length)

    work: dict[str, Callable[[], None]] = {
        f"pagewire, {num} at once": lambda: ours(batch),
        f"pagewire, {num} one after another": one_by_one(ours),
        f"transformers, one batch of {num}": lambda: theirs(batch),
        f"transformers, {num} one after another": one_by_one(theirs),
    }
    rows = {title: Row(title) for title in work}

    def measure(title: str) -> Callable[[], None]:
        def run() -> None:
            started = time.perf_counter()
            work[title]()
            seconds = time.perf_counter() - started
            rows[title].add(**{"seconds": seconds, "output tok/s": num * length / seconds})

        return run

    ours(batch)  # warm up
    theirs(batch)
    repeat(arguments.repeat, *map(measure, work))
    print(f"{name}, {num} × {arguments.input_len} in, {length} out, {arguments.dtype}, {arguments.threads} thread(s)")
    print_table(list(rows.values()))
    settings = {k: str(v) if isinstance(v, Path) else v for k, v in vars(arguments).items() if k != "json"}
    write_json(arguments.json, "offline throughput", list(rows.values()), facts, settings | {"model": name})


if __name__ == "__main__":
    main()
