"""The effect of the scheduling policies on two tenants as load grows.

`python -m pagewire.bench.engine.policies` sends the requests of two tenants at random times (Poisson): *chat*, short
prompts and outputs at priority 0, and *batch*, longer ones at priority 1 with three quarters of the tokens. Every
policy gets the same requests at the same times. Under slo the first token of a chat is due in `--ttft-ms`,
and batch has no target; the share of chats that had it in time is counted for every policy. It prints, writes and draws
throughput, this share, and the 99th percentiles of time to first token and of whole requests, for each tenant, by the
offered load. The load is given as a share of the engine's
capacity: the rate at which it finishes the same mix when all requests are queued from the start.
"""

import argparse
import random
import time
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

import torch

from ...engine.checkpoint.source import locate
from ...engine.core.policy import PolicyName
from ..plots import panels
from ..report import Row, machine, percentile, print_table, write_json
from ..workload import prompts
from .in_process import Engine, Timed

_TENANTS = {"chat": (0, 32, 16), "batch": (1, 192, 64)}
"""Tenant → priority, prompt tokens, output tokens of each of its requests."""

_SHARE_CHAT = 0.6  # of the requests
_MET = "chat TTFT in time %"
_COLUMNS = ("output tok/s", _MET, "chat TTFT p99 ms", "batch TTFT p99 ms", "chat total p99 ms", "batch total p99 ms")


@dataclass(frozen=True)
class Arrival:
    """One request of the workload."""

    at_s: float  # after the start
    tenant: str
    prompt: list[int]


def arrivals(folder: Path, rate: float, num: int, seed: int) -> list[Arrival]:
    """`num` requests at `rate` per second."""
    rng = random.Random(seed)
    pools = {tenant: prompts(folder, 32, length) for tenant, (_, length, _) in _TENANTS.items()}
    found, now = [], 0.0
    for _ in range(num):
        now += rng.expovariate(rate)
        tenant = "chat" if rng.random() < _SHARE_CHAT else "batch"
        found.append(Arrival(now, tenant, rng.choice(pools[tenant])))
    return found


def measure(engine: Engine, work: list[Arrival], ttft_ms: float) -> dict[str, float]:
    """Sends each request at its time (open loop) and waits for the last. `ttft_ms`: when the first token of a chat is
    due, in ms after it was sent."""
    started = time.perf_counter()
    requests: list[tuple[str, Timed]] = []
    for arrival in work:
        due = started + arrival.at_s
        engine.run(until=lambda due=due: time.perf_counter() >= due)  # type: ignore[misc]  # mypy: no lambda defaults
        priority, _, length = _TENANTS[arrival.tenant]
        request = engine.send(
            arrival.prompt, length, priority=priority, tenant=arrival.tenant, latency_class=arrival.tenant
        )
        request.sent = due  # counts the wait for a running step as the engine's
        requests.append((arrival.tenant, request))
    engine.run()
    last = max(request.times[-1] for _, request in requests)
    figures = {"output tok/s": sum(len(request.times) for _, request in requests) / (last - started)}
    for tenant in _TENANTS:
        mine = [request for owner, request in requests if owner == tenant]
        for p in (50, 99):
            figures[f"{tenant} TTFT p{p} ms"] = percentile([request.first_ms for request in mine], p)
            figures[f"{tenant} total p{p} ms"] = percentile([request.total_ms for request in mine], p)
    chats = [request for owner, request in requests if owner == "chat"]
    figures[_MET] = 100 * sum(request.first_ms <= ttft_ms for request in chats) / max(1, len(chats))
    return figures


def capacity(engine: Engine, folder: Path, num: int) -> float:
    """Requests of the mix that the engine finishes per second."""
    started = time.perf_counter()
    measure(engine, arrivals(folder, 1e9, num, seed=1), ttft_ms=1.0)
    return num / (time.perf_counter() - started)


def main(argv: list[str] | None = None) -> None:
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    flags.add_argument("--loads", type=float, nargs="+", default=[0.5, 0.8, 1.0, 1.2], help="offered loads")
    flags.add_argument("--requests", type=int, default=120, help="requests of one measurement")
    flags.add_argument("--max-num-seqs", type=int, default=8, help="requests that run at once")
    flags.add_argument("--ttft-ms", type=float, default=200.0, help="when the first token of a chat is due")
    flags.add_argument("--threads", type=int, default=1, help="torch threads")
    flags.add_argument("--repeat", type=int, default=3, help="repetitions, each with other arrivals")
    flags.add_argument("--json", type=Path, default=Path("bench/results/policies.json"), help="where to write")
    flags.add_argument("--plot", type=Path, default=Path("docs/images/policies.png"), help="where to draw")
    flags.add_argument("--quick", action="store_true", help="few requests, once, as a test of the program")
    arguments = flags.parse_args(argv)
    if arguments.quick:
        arguments.loads, arguments.requests, arguments.repeat = [0.5, 1.2], 12, 1
    facts = machine()
    folder, name = locate("", None)
    torch.set_num_threads(arguments.threads)
    engines = {
        policy: Engine(
            folder,
            dtype="float32",
            threads=arguments.threads,
            scheduling_policy=policy,
            latency_classes={"chat": {"ttft_ms": arguments.ttft_ms}, "batch": {}},
            max_num_seqs=arguments.max_num_seqs,
            enable_prefix_caching=False,
            kv_cache_memory=64 * 2**20,
        )
        for policy in get_args(PolicyName)
    }
    for engine in engines.values():
        capacity(engine, folder, 4)  # warm up
    most = capacity(engines["fcfs"], folder, arguments.requests)
    table = {policy: [Row(f"{policy} at {load:g}") for load in arguments.loads] for policy in engines}
    for seed in range(arguments.repeat):
        for i, load in enumerate(arguments.loads):
            work = arrivals(folder, load * most, arguments.requests, seed)
            for policy, engine in engines.items():
                table[policy][i].add(**measure(engine, work, arguments.ttft_ms))
    rows = [row for i in range(len(arguments.loads)) for row in (table[policy][i] for policy in engines)]
    print(
        f"{name}, capacity {most:.1f} requests/s with {arguments.max_num_seqs} at once, {arguments.threads} thread(s)"
    )
    print_table(rows)
    settings = {"capacity requests/s": most, "requests": arguments.requests, "max_num_seqs": arguments.max_num_seqs}
    settings["ttft_ms"] = arguments.ttft_ms
    write_json(
        arguments.json, "policies under load", rows, facts, {**settings, "loads": arguments.loads, "model": name}
    )
    panels(
        arguments.plot,
        f"two tenants, {arguments.max_num_seqs} requests at once",
        f"offered load, in shares of {most:.0f} requests/s",
        arguments.loads,
        table,
        _COLUMNS,
        log=_COLUMNS[2:],
    )


if __name__ == "__main__":
    main()
