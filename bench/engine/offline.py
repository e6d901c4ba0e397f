"""Throughput without HTTP: `LLM.generate` with all prompts at once and one after another, compared with transformers.

`python -m pagewire.bench.engine.offline` prints a table (median, smallest and largest of the repetitions) and writes
JSON.
"""

import time
from collections.abc import Callable

import torch

from ...engine.checkpoint.source import locate
from ...offline.llm import LLM
from ...offline.sampling_params import SamplingParams
from ..report import Row, machine, print_table, repeat, write_json
from ..workload import Transformers, parser, prompts, settings


def main(argv: list[str] | None = None) -> None:
    flags = parser(__doc__, json="bench/results/offline.json")
    arguments = flags.parse_args(argv)
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
    write_json(arguments.json, "offline throughput", list(rows.values()), facts, settings(arguments, name))


if __name__ == "__main__":
    main()
