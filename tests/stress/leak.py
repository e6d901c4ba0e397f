"""Checks whether a server leaks with the number of requests: memory, descriptors and threads of each process.

`python -m pagewire.tests.stress.leak` sends 20,000 short requests of many kinds, including invalid ones and clients
that disconnect, and samples the resources of every process after each thousand, when the server is idle. The slope is
the median of the slopes between any two samples (Theil–Sen), so that a single step, such as a buffer that is kept, does
not count. No process may grow by 0.5 MB per thousand requests, nor in descriptors and threads except for one step each.

It prints a table, writes JSON, and ends with exit code 1 if something grows. `test_leak.py` tests it with deliberate
leaks.
"""

import argparse
import asyncio
import statistics
from collections.abc import Mapping, Sequence
from itertools import combinations, pairwise
from pathlib import Path
from typing import NamedTuple

import uvloop

from ...bench.report import Row, machine, print_table, write_json
from ...tools.servers import MB, Holding, Server
from .client import Answer, ask, completion, connect, leave, request_bytes, serving

MAX_MB = 0.5  # that a process may grow in a thousand requests
MAX_HANDLES = 0.1  # descriptors or threads; a leak in every hundredth request is ten
_LIMIT_S = 120.0
_NUM_SCHEMAS = 8
_CONCURRENCY = 32
_SETTLE_S = 0.5
_WARM_UP = 2  # samples that are not kept, because caches fill


class Slope(NamedTuple):
    """Growth of a process per thousand requests."""

    num_bytes: float
    num_fds: float
    num_threads: float


class Looks:
    """Samples of the processes' resources by the number of requests."""

    def __init__(self) -> None:
        self._nums: list[int] = []
        self.holdings: dict[str, list[Holding]] = {}

    def add(self, num_requests: int, holdings: Mapping[str, Holding]) -> None:
        """Adds one sample; all must be of the same processes."""
        self._nums.append(num_requests)
        for name, held in holdings.items():
            self.holdings.setdefault(name, []).append(held)
        assert all(len(held) == len(self._nums) for held in self.holdings.values()), "a process came or went"

    def slopes(self) -> dict[str, Slope]:
        """The slopes by process."""
        found = {}
        for name, held in self.holdings.items():
            num_bytes, num_fds, num_threads = map(list, zip(*held, strict=True))
            counts = map(without_step, (num_fds, num_threads))
            found[name] = Slope(self._slope(num_bytes), *map(self._slope, counts))
        return found

    def _slope(self, values: Sequence[int]) -> float:
        points = zip(self._nums, values, strict=True)
        return statistics.median(1000 * (y2 - y1) / (x2 - x1) for (x1, y1), (x2, y2) in combinations(points, 2))


def without_step(counts: Sequence[int]) -> list[int]:
    """Removes the largest step, which may be a process that is started on demand: in the middle of the samples it would
    show in the slope."""
    steps = [after - before for before, after in pairwise(counts)]
    at = max(range(len(steps)), key=steps.__getitem__)
    return [count - steps[at] * (i > at) for i, count in enumerate(counts)]


def complaints(slopes: Mapping[str, Slope]) -> list[str]:
    """One sentence for each kind of growth."""
    found = []
    for name, slope in slopes.items():
        if slope.num_bytes / MB > MAX_MB:
            found.append(f"{name} grows by {slope.num_bytes / MB:.2f} MB in a thousand requests")
        if slope.num_fds > MAX_HANDLES:
            found.append(f"{name} opens {slope.num_fds:.1f} descriptors more in a thousand requests")
        if slope.num_threads > MAX_HANDLES:
            found.append(f"{name} starts {slope.num_threads:.1f} threads more in a thousand requests")
    return found


def _schema(kind: int) -> dict[str, object]:
    properties = {f"field_{kind}_{i}": {"type": "integer"} for i in range(3)}
    return {"type": "object", "properties": properties, "required": list(properties)}


def kinds(i: int) -> list[tuple[bytes, int]]:
    """A request of each kind with its expected status. `i`: makes each round different."""
    says = [{"role": "user", "content": f"Count from {i} to {i + 3}"}]
    chat: dict[str, object] = {"messages": says, "max_tokens": 8, "ignore_eos": True}
    shape = {"type": "json_schema", "json_schema": {"name": "shape", "schema": _schema(i % _NUM_SCHEMAS)}}
    tool = {"type": "function", "function": {"name": "look", "parameters": _schema(i % _NUM_SCHEMAS)}}
    chats: tuple[dict[str, object], ...] = (
        {"stream": True},
        {"n": 2, "logprobs": True, "top_logprobs": 3},
        {"stream": True, "stop": ["5"], "temperature": 1, "seed": i},
        {"response_format": shape, "ignore_eos": False},
        {"tools": [tool], "stream": True},
    )
    return [
        (completion(8, prompt=f"{i} is a number"), 200),
        (completion(8, is_stream=True, prompt=f"{i} is a number"), 200),
        *((request_bytes("/v1/chat/completions", chat | more), 200) for more in chats),
        (request_bytes("/v1/responses", {"input": f"{i}?", "max_output_tokens": 8, "store": False}), 200),
        (request_bytes("/v1/messages", {"messages": says, "max_tokens": 8}), 200),
        (request_bytes("/tokenize", {"prompt": f"{i} is a number"}), 200),
        (request_bytes("/v1/chat/completions", chat | {"temperature": -i}), 400),
        (request_bytes("/v1/completions", {"prompt": "one " * 20_000}), 400),
        (request_bytes("/metrics"), 200),
        (request_bytes(f"/nothing/{i}"), 404),
    ]


async def hang_up(port: int, i: int) -> None:
    """Requests a long answer and disconnects after its first byte."""
    connection = await connect(port, completion(400, is_stream=True, prompt=f"{i} is a number"))
    await asyncio.get_running_loop().sock_recv(connection, 1)
    leave(connection, is_reset=bool(i % 2))


async def send(server: Server, first: int, num: int) -> int:
    """Sends at least `num` requests in rounds of all kinds, numbered from `first`. Returns the next round's number."""
    i, num_left = first, num
    limit = asyncio.Semaphore(_CONCURRENCY)

    async def one(request: bytes, status: int) -> Answer:
        async with limit:
            answer = await ask(server.port, request, _LIMIT_S)
        if answer.status != status:
            raise SystemExit(f"{answer.status} instead of {status}: {request[:300]!r} {answer.body[:300]!r}")
        return answer

    async def disconnect(i: int) -> None:
        async with limit:
            await hang_up(server.port, i)

    async with asyncio.TaskGroup() as group:
        while num_left > 0:
            round = kinds(i)
            for request, status in round:
                group.create_task(one(request, status))
            group.create_task(disconnect(i))
            i += 1
            num_left -= len(round) + 1
    return i


async def watch(server: Server, num_requests: int, num_looks: int) -> Looks:
    """Takes samples while the requests are served."""
    looks = Looks()
    step, i = num_requests // num_looks, 1
    for look in range(-_WARM_UP, num_looks + 1):
        i = await send(server, i, step)
        await asyncio.to_thread(server.wait_idle)
        await asyncio.sleep(_SETTLE_S)
        if look >= 0:
            looks.add(look * step, server.holdings())
    return looks


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the program. 1 if something grows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--requests", type=int, default=20_000, help="requests after the warm-up")
    parser.add_argument("--looks", type=int, default=20, help="samples of the resources")
    parser.add_argument("--json", type=Path, default=Path("tests/stress/results/leak.json"), help="where to write")
    arguments = parser.parse_args(argv)
    facts = machine()
    # Little KV memory, so that the tables of cached prefixes are full before the first sample.
    with serving("--kv-cache-memory", "32M") as server:
        looks = uvloop.run(watch(server, arguments.requests, arguments.looks))
    rows, slopes = [], looks.slopes()
    for name, slope in slopes.items():
        row = Row(name)
        for held in looks.holdings[name]:
            row.add(MB=held.num_bytes / MB, descriptors=held.num_fds, threads=held.num_threads)
        row.add(**{"MB / 1,000 requests": slope.num_bytes / MB})
        rows.append(row)
    print_table(rows)
    settings = {key: value for key, value in vars(arguments).items() if key != "json"}
    write_json(arguments.json, "leaks", rows, facts, settings)
    broken = complaints(slopes)
    print("\n".join(broken) or "nothing grows")
    return int(bool(broken))


if __name__ == "__main__":
    raise SystemExit(main())
