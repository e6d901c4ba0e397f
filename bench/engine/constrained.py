"""The cost of a grammar: for streams that follow one, and for free streams in the same batch.

`python -m pagewire.bench.engine.constrained` starts an engine without HTTP (core, grammar, worker) and runs N free
streams alone, with N more free ones, with N that follow a grammar ("bound"), and N bound ones alone. It prints the
inter-token latency and the throughput of both kinds. All are greedy and generate the same number of tokens. It uses
only `EngineClient`, so the same file measures an older version of the engine.
"""

import argparse
import asyncio
import time
from itertools import pairwise
from pathlib import Path

from ...client.engine_client import EngineClient, Generation
from ...ipc.messages import Constraint, Limits, Sampling
from ..report import Row, machine, percentile, print_table, write_json

GRAMMAR = Constraint("regex", "([a-z]{1,9} )*")
_PROMPT_LEN = 32


async def _arrivals(generation: Generation) -> list[float]:
    """The times at which its tokens arrived."""
    return [time.perf_counter() async for _ in generation]


async def measure(client: EngineClient, num_free: int, num_bound: int, num_tokens: int) -> dict[str, float]:
    """Runs all streams at once. Returns the figures."""
    started = time.perf_counter()
    limits, sampling = Limits(num_tokens, ignore_eos=True), Sampling(temperature=0)
    prompts = [[10 + i, *range(40, 39 + _PROMPT_LEN)] for i in range(num_free + num_bound)]
    streams = [
        _arrivals(client.generate(prompt, sampling, limits, constraint=GRAMMAR if i >= num_free else None))
        for i, prompt in enumerate(prompts)
    ]
    times = await asyncio.gather(*streams)
    figures: dict[str, float] = {}
    for kind, those in (("free", times[:num_free]), ("bound", times[num_free:])):
        if those:
            gaps = [1000 * (b - a) for times_of_one in those for a, b in pairwise(times_of_one)]
            if gaps:  # none if all output of a short run arrived at once
                figures |= {f"{kind} ITL p{part} ms": percentile(gaps, part) for part in (50, 99)}
            figures[f"{kind} tokens/s"] = len(those) * num_tokens / (max(map(max, those)) - started)
    return figures


async def run(arguments: argparse.Namespace) -> dict[str, Row]:
    """Measures the cases in turn."""
    num, num_tokens = arguments.streams, arguments.tokens
    cases = {
        f"{num} free": (num, 0),
        f"{num} free beside {num} free": (2 * num, 0),
        f"{num} free beside {num} bound": (num, num),
        f"{num} bound": (0, num),
    }
    rows = {name: Row(name) for name in cases}
    options = {"threads": arguments.threads, "enable_prefix_caching": False, "max_num_seqs": 2 * num}
    async with await EngineClient.start(arguments.model, **options) as client:
        await measure(client, num, num, 16)  # warm up, which also loads the grammar library
        for _ in range(arguments.repeat):
            for name, (num_free, num_bound) in cases.items():
                rows[name].add(**await measure(client, num_free, num_bound, num_tokens))
    return rows


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--model", default="", help="a folder (default: the demo model)")
    parser.add_argument("--streams", type=int, default=8, help="of each kind")
    parser.add_argument("--tokens", type=int, default=128, help="of each stream")
    parser.add_argument("--threads", type=int, default=1, help="of the worker")
    parser.add_argument("--repeat", type=int, default=5, help="repetitions")
    parser.add_argument("--json", type=Path, default=Path("bench/results/constrained.json"), help="where to write")
    arguments = parser.parse_args(argv)
    facts = machine()
    rows = asyncio.run(run(arguments))
    print_table(list(rows.values()))
    settings = {"streams": arguments.streams, "tokens": arguments.tokens, "threads": arguments.threads}
    write_json(arguments.json, "constrained", list(rows.values()), facts, settings)


if __name__ == "__main__":
    main()
