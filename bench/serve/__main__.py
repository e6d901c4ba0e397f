"""A server over HTTP: N streams at once compared with the same N one after another.

`python -m pagewire.bench.serve` starts a server (or uses `--url`), streams completions with a small client, and prints
time to first token, inter-token latency and tokens per second. The table also has transformers' `generate`, without
HTTP.
"""

import argparse
import asyncio
import json
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ...commands.bench.load import Outcome, Sample, Target, run
from ...engine.checkpoint.source import locate
from ...tools.servers import Server
from ..report import Row, machine, percentile, print_table, repeat, write_json
from ..workload import Transformers, parser, prompts, settings


@contextmanager
def serving(arguments: argparse.Namespace) -> Iterator[str]:
    """The URL of the server to measure."""
    if arguments.url:
        yield arguments.url
        return
    flags = ["--dtype", arguments.dtype, "--no-enable-prefix-caching", "--threads", str(arguments.threads)]
    with Server(None, *flags, *([arguments.model] if arguments.model else [])) as server:
        yield server.url


def main(argv: list[str] | None = None) -> None:
    flags = parser(__doc__, json="bench/results/serve.json")
    flags.add_argument("--url", default="", help="a running server; empty: start one")
    arguments = flags.parse_args(argv)
    folder, name = locate(arguments.model, None)
    facts = machine()
    num, length = arguments.num_prompts, arguments.output_len
    batch = prompts(folder, num, arguments.input_len)
    together, alone = Row(f"pagewire, {num} streams at once"), Row(f"pagewire, {num} streams one after another")
    peer_together, peer_alone = Row(f"transformers, one batch of {num}"), Row("transformers, one after another")

    def record(row: Row, seconds: float, outcomes: list[Outcome]) -> None:
        first = [outcome.ttft for outcome in outcomes]
        gaps = [gap for outcome in outcomes for gap in outcome.itl]
        figures = {"seconds": seconds, "output tok/s": num * length / seconds}
        for label, values in (("TTFT", first), ("ITL", gaps)):
            if values:
                figures |= {f"{label} p{p} ms": percentile(values, p) * 1e3 for p in (50, 99)}
        row.add(**figures)

    with serving(arguments) as url:
        with urllib.request.urlopen(f"{url}/v1/models", timeout=10) as response:
            model = json.load(response)["data"][0]["id"]

        fields = {"temperature": 0, "ignore_eos": True}
        headers = {"Content-Type": "application/json"}
        target = Target(url=f"{url}/v1/completions", is_chat=False, model=model, fields=fields, headers=headers)
        samples = [Sample(prompt, len(prompt), length) for prompt in batch]

        def measure(row: Row, at_once: int) -> Callable[[], None]:
            def measured() -> None:
                started = time.perf_counter()
                outcomes = asyncio.run(
                    run(target, samples, [0.0] * num, max_concurrency=at_once, on_end=lambda outcome: None)
                )
                if errors := [outcome.error for outcome in outcomes if outcome.error]:
                    raise SystemExit(errors[0])
                record(row, time.perf_counter() - started, outcomes)

            return measured

        measure(Row("warm-up"), num)()
        repeat(arguments.repeat, measure(together, num), measure(alone, 1))

    import torch

    torch.set_num_threads(arguments.threads)
    peer = Transformers(folder, arguments.dtype)

    def generate(row: Row, groups: list[list[list[int]]]) -> Callable[[], None]:
        def run() -> None:
            started = time.perf_counter()
            for group in groups:
                peer.generate(group, length)
            record(row, time.perf_counter() - started, [])

        return run

    peer.generate(batch[:1], 4)  # warm up
    repeat(arguments.repeat, generate(peer_together, [batch]), generate(peer_alone, [[prompt] for prompt in batch]))

    rows = [together, alone, peer_together, peer_alone]
    print(f"{name}, {num} × {arguments.input_len} in, {length} out, {arguments.dtype}, {arguments.threads} thread(s)")
    print_table(rows)
    print(f"at once against one after another: {alone.median('seconds') / together.median('seconds'):.1f} × faster")
    write_json(arguments.json, "serving over HTTP", rows, facts, settings(arguments, name))


if __name__ == "__main__":
    main()
