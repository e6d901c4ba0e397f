"""Far more requests at once than a server has rows: answers, refusals, throughput and memory.

`python -m pagewire.tests.stress.overload` measures the best rate of short completions without refusals. Then it sends
2,000 of them, half of them streams, each on its own connection and all at once. Each must be answered with 200, or
refused with 429 or 503 and a Retry-After, within a minute. Meanwhile `/health` must be 200 within a second, the
server's processes must not grow by 256 MB, and the rate must not fall below nine tenths of the best rate. It prints a
table, writes JSON, and ends with exit code 1 if a promise was broken.
"""

import argparse
import asyncio
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import uvloop

from ...bench.report import Row, machine, print_table, write_json
from ...tools.servers import MB, Server
from .client import Answer, ask, closed_loop, completion, serving

LIMIT_S = 60.0  # for every answer
HEALTH_LIMIT_S = 1.0
MAX_GROWTH_MB = 256.0
LEAST_GOODPUT = 0.9  # of the best rate
_HEALTH_S = 0.2  # between checks
_MEMORY_S = 0.5


def work(num: int, num_tokens: int) -> list[bytes]:
    """`num` different requests."""
    return [completion(num_tokens, is_stream=i % 2 == 0, prompt=f"{i} is a number") for i in range(num)]


async def best_rate(server: Server, num: int, num_tokens: int, concurrencies: Sequence[int]) -> float:
    """The best rate, in requests per second, of closed loops with these concurrencies."""
    best = 0.0
    for concurrency in concurrencies:
        began = time.monotonic()
        answers = await closed_loop(server.port, work(num, num_tokens), concurrency, LIMIT_S)
        if wrong := Counter(answer.status for answer in answers if answer.status != 200):
            raise SystemExit(f"{concurrency} requests at a time are no overload, but there were {dict(wrong)}")
        best = max(best, num / (time.monotonic() - began))
    return best


@dataclass
class Seen:
    """Observations of a server during a measurement."""

    growth_mb: float = 0.0
    slowest_health_s: float = 0.0
    num_unhealthy: int = 0


class Watch:
    """A context that observes a server's health and memory on threads."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._before = server.num_bytes()
        self.seen = Seen()

    def __enter__(self) -> "Watch":
        self._ended = threading.Event()
        self._threads = [threading.Thread(target=look) for look in (self._look_at_health, self._look_at_memory)]
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        for thread in self._threads:
            thread.join()

    def _look_at_health(self) -> None:
        """Runs on its own thread, because the clients' event loop may be busy."""
        while not self._ended.wait(_HEALTH_S):
            began = time.monotonic()
            self.seen.num_unhealthy += not self._server.answers("/health", 10 * HEALTH_LIMIT_S)
            self.seen.slowest_health_s = max(self.seen.slowest_health_s, time.monotonic() - began)

    def _look_at_memory(self) -> None:
        while not self._ended.wait(_MEMORY_S):
            self.seen.growth_mb = max(self.seen.growth_mb, (self._server.num_bytes() - self._before) / MB)


async def flood(server: Server, num: int, num_tokens: int) -> tuple[list[Answer], Seen, float]:
    """Sends all requests at once. Returns the answers, the observations, and the rate until the last one was served."""
    with Watch(server) as watch:
        answers = await asyncio.gather(*(ask(server.port, request, LIMIT_S) for request in work(num, num_tokens)))
    served = [answer.seconds for answer in answers if answer.status == 200]
    return list(answers), watch.seen, len(served) / max(served, default=1.0)


def complaints(answers: Sequence[Answer], seen: Seen, goodput: float) -> list[str]:
    """The broken promises."""
    lost = Counter(answer.status for answer in answers if answer.status != 200 and not answer.is_refusal)
    found = [f"{num} requests got status {status} (0: none in {LIMIT_S:g} s)" for status, num in lost.items()]
    if seen.num_unhealthy or seen.slowest_health_s > HEALTH_LIMIT_S:
        found.append(f"/health failed {seen.num_unhealthy} times and took up to {seen.slowest_health_s:.2f} s")
    if seen.growth_mb > MAX_GROWTH_MB:
        found.append(f"the processes grew by {seen.growth_mb:.0f} MB")
    if goodput < LEAST_GOODPUT:
        found.append(f"only {100 * goodput:.0f} % of the best rate was served")
    return found


async def measure(arguments: argparse.Namespace, row: Row) -> list[str]:
    """Runs one repetition. Returns the broken promises."""
    flags = [] if arguments.queue is None else ["--max-queued-requests", str(arguments.queue)]
    with serving("--no-enable-prefix-caching", *flags) as server:
        num_tokens = arguments.tokens
        await closed_loop(server.port, work(32, num_tokens), 32, LIMIT_S)  # warms up
        best = await best_rate(server, arguments.unloaded, num_tokens, arguments.concurrency)
        answers, seen, rate = await flood(server, arguments.requests, num_tokens)
        statuses = Counter(answer.status for answer in answers)
        refused = [int(a.head.lower().partition(b"retry-after: ")[2].split()[0]) for a in answers if a.is_refusal]
        row.add(
            **{"200": statuses[200], "429": statuses[429], "503": statuses[503]},
            **{"slowest answer s": max(answer.seconds for answer in answers)},
            **{"slowest refusal s": max((a.seconds for a in answers if a.is_refusal), default=0.0)},
            **{"most Retry-After s": max(refused, default=0)},
            **{"slowest /health s": seen.slowest_health_s, "growth MB": seen.growth_mb},
            **{"best req/s": best, "overloaded req/s": rate, "goodput %": 100 * rate / best},
        )
        return complaints(answers, seen, rate / best)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the program. 1 if a promise was broken."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--requests", type=int, default=2000, help="requests at once")
    parser.add_argument("--tokens", type=int, default=16, help="tokens of each")
    parser.add_argument("--unloaded", type=int, default=1000, help="requests to find the best rate with")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[64, 128, 256], help="for the best rate")
    parser.add_argument("--queue", type=int, help="--max-queued-requests of the server (default: its own)")
    parser.add_argument("--repeat", type=int, default=3, help="repetitions, each with a new server")
    parser.add_argument("--json", type=Path, default=Path("tests/stress/results/overload.json"), help="where to write")
    arguments = parser.parse_args(argv)
    facts, row = machine(), Row(f"{arguments.requests} at once")
    broken = [sentence for _ in range(arguments.repeat) for sentence in uvloop.run(measure(arguments, row))]
    print_table([row])
    settings = {key: value for key, value in vars(arguments).items() if key != "json"}
    write_json(arguments.json, "overload", [row], facts, settings)
    print("\n".join(broken) or "every promise was kept")
    return int(bool(broken))


if __name__ == "__main__":
    raise SystemExit(main())
