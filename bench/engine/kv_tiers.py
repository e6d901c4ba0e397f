"""The benefit of KV tiers: hit rate and time to first token by the tier's size, and whether loading a prefix from host
memory is faster than computing it again.

`python -m pagewire.bench.engine.kv_tiers` sends one request after another, each with a long shared prefix, chosen by
Zipf's law (the r-th most popular with weight 1/r), and its own end. All prefixes together need four times the device's
pool. Host and disk tiers of several sizes get the same requests, after each prefix was sent once. Then it sends prompts
that were computed before and evicted from the device, and compares their time to first token with and without a host
tier. It prints both tables, writes JSON and draws two figures.

Reads of the disk tier usually hit the kernel's page cache, as they do in production if memory is free.
"""

import argparse
import random
import tempfile
from contextlib import closing
from pathlib import Path

import torch

from ...engine.checkpoint.source import locate
from ..plots import panels
from ..report import Row, machine, percentile, print_table, write_json
from ..workload import prompts
from .in_process import Engine

_PREFIX_LEN = 1024
_OWN_LEN = 32
_OUTPUT_LEN = 4
_TOKEN_BYTES = 4096  # KV of one position of the demo model in float32
_TIERS = ("host", "disk")
_COLUMNS = ("hit rate", "hit rate of the tier", "TTFT p50 ms", "TTFT p99 ms")


def engine_with(tier: str, size: int, pool: int, folder: Path, threads: int) -> Engine:
    """An engine with a pool of `pool` positions and, if `size` is not 0, a tier of `size` positions."""
    options = {"host": "host", "disk": f"disk,path={folder}"}
    spec = (f"{options[tier]},size={size * _TOKEN_BYTES}",) if size else ()
    return Engine(
        locate("", None)[0],
        dtype="float32",
        threads=threads,
        kv_cache_memory=pool * _TOKEN_BYTES,
        kv_connector=spec,
    )


def tier_hits(engine: Engine) -> int:
    """Positions loaded from tiers so far."""
    connector = engine.scheduler.connector
    return 0 if connector is None else sum(tier.num_hit_tokens for tier in connector.tiers())


def shared_prefixes(engine: Engine, prefixes: list[list[int]], num: int, seed: int) -> dict[str, float]:
    """Sends one request for each prefix, then `num` requests with random prefixes. Returns the figures."""
    rng = random.Random(seed)
    weights = [1 / rank for rank in range(1, len(prefixes) + 1)]
    for prefix in prefixes:
        engine.send(prefix, 1)
        engine.run()
    before = tier_hits(engine)
    first_ms: list[float] = []
    num_cached = 0
    for prefix in rng.choices(prefixes, weights, k=num):
        request = engine.send(prefix + [rng.randrange(20, 700) for _ in range(_OWN_LEN)], _OUTPUT_LEN)
        engine.run()
        assert request.usage is not None
        num_cached += request.usage.num_cached
        first_ms.append(request.first_ms)
    total = num * (_PREFIX_LEN + _OWN_LEN)
    return {
        "hit rate": num_cached / total,
        "hit rate of the tier": (tier_hits(engine) - before) / total,
        "TTFT p50 ms": percentile(first_ms, 50),
        "TTFT p99 ms": percentile(first_ms, 99),
    }


def seen_before(engine: Engine, batch: list[list[int]], rounds: int) -> tuple[float, float]:
    """(median time to first token in ms, share loaded) of prompts sent in turn to a pool that holds one of them."""
    for prompt in batch * 2:  # in the second round the scheduler learns the cost of a load
        engine.send(prompt, 1)
        engine.run()
    before = tier_hits(engine)
    first_ms = []
    for prompt in batch * rounds:
        request = engine.send(prompt, 1)
        engine.run()
        first_ms.append(request.first_ms)
    return percentile(first_ms, 50), (tier_hits(engine) - before) / (rounds * sum(map(len, batch)))


def main(argv: list[str] | None = None) -> None:
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    flags.add_argument("--prefixes", type=int, default=32, help="shared prefixes of 1024 tokens")
    flags.add_argument("--sizes", type=float, nargs="+", default=[0, 0.25, 0.5, 0.75, 1.0], help="in all prefixes")
    flags.add_argument("--requests", type=int, default=120, help="requests of one measurement")
    flags.add_argument("--lengths", type=int, nargs="+", default=[1024, 2048, 4096], help="prompts seen before")
    flags.add_argument("--threads", type=int, default=1, help="torch threads")
    flags.add_argument("--repeat", type=int, default=3, help="repetitions")
    flags.add_argument("--json", type=Path, default=Path("bench/results/kv_tiers.json"), help="where to write")
    flags.add_argument("--plots", type=Path, default=Path("docs/images"), help="folder for the figures")
    flags.add_argument("--quick", action="store_true", help="few requests, once, as a test of the program")
    arguments = flags.parse_args(argv)
    if arguments.quick:
        arguments.prefixes, arguments.sizes, arguments.requests = 8, [0, 1.0], 12
        arguments.lengths, arguments.repeat = [1024], 1
    facts = machine()
    folder, name = locate("", None)
    torch.set_num_threads(arguments.threads)
    prefixes = prompts(folder, arguments.prefixes, _PREFIX_LEN)
    working_set = arguments.prefixes * _PREFIX_LEN

    sizes = {size: {tier: Row(f"{tier} {size:.0%}") for tier in _TIERS} for size in arguments.sizes}
    if 0 in sizes:
        sizes[0] = dict.fromkeys(_TIERS, Row("no tier"))
    computed = {length: Row(f"{length} tokens, computed") for length in arguments.lengths}
    loaded = {length: Row(f"{length} tokens, host tier") for length in arguments.lengths}
    for seed in range(arguments.repeat):
        for size, by_tier in sizes.items():
            for tier in _TIERS if size else _TIERS[:1]:
                with (
                    tempfile.TemporaryDirectory(prefix="pagewire-bench-") as scratch,
                    closing(
                        engine_with(tier, int(size * working_set), working_set // 4, Path(scratch), arguments.threads)
                    ) as engine,
                ):
                    by_tier[tier].add(**shared_prefixes(engine, prefixes, arguments.requests, seed))
        for length in arguments.lengths:
            batch = prompts(folder, 3, length, seed=length)
            for row, size in ((computed[length], 0), (loaded[length], 4 * length)):
                with closing(engine_with("host", size, length + 64, Path(), arguments.threads)) as engine:
                    ms, share = seen_before(engine, batch, 2 if arguments.quick else 5)
                    row.add(**{"TTFT p50 ms": ms, "share loaded": share})

    pool = f"a device pool for a quarter of {arguments.prefixes} prefixes of {_PREFIX_LEN} tokens"
    print(f"{name}, {pool}, {arguments.threads} thread(s)")
    table = [row for size, by_tier in sizes.items() for row in list(by_tier.values())[: None if size else 1]]
    print_table(table)
    versus = [row for length in arguments.lengths for row in (computed[length], loaded[length])]
    print_table(versus)
    for length in arguments.lengths:
        ratio = computed[length].median("TTFT p50 ms") / loaded[length].median("TTFT p50 ms")
        share = loaded[length].median("share loaded")
        print(f"{length} tokens: {share:.0%} loaded, first token {ratio:.2f} × as fast as computed again")
    settings = {"prefixes": arguments.prefixes, "requests": arguments.requests, "pool": pool, "model": name}
    write_json(arguments.json, "KV tiers", [*table, *versus], facts, settings)
    panels(
        arguments.plots / "kv_tiers.png",
        f"{arguments.prefixes} shared prefixes, {pool.partition(' of ')[0]} of them",
        "size of the tier, in all prefixes",
        arguments.sizes,
        {tier: [by_tier[tier] for by_tier in sizes.values()] for tier in _TIERS},
        _COLUMNS,
    )
    panels(
        arguments.plots / "kv_host_hit.png",
        "prompts computed before and evicted from the device",
        "prompt tokens",
        arguments.lengths,
        {"computed again": list(computed.values()), "host tier": list(loaded.values())},
        ("TTFT p50 ms", "share loaded"),
    )


if __name__ == "__main__":
    main()
