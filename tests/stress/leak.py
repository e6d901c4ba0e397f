"""Whether a server grows with the requests that it has served: memory, descriptors and threads of each process.

`python -m pagewire.tests.stress.leak` sends 20,000 short requests of many kinds, answers that nobody waits for and
mistakes among them, and looks at what every process holds after each thousand, when all is idle. The slope is the
median of those between any two looks (Theil–Sen), so that one step, such as a buffer that is kept, is not taken for
growth. No process may grow by 0.5 MB in a thousand requests, nor at all in descriptors and threads, but for one step of
each.

It prints a table, writes JSON, and ends with exit code 1 if something grows. `test_leak.py` has it find
leaks that were made for it.
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
_WARM_UP = 2  # looks: caches fill


class Slope(NamedTuple):
    """How a process grows in a thousand requests."""

    num_bytes: float
    num_fds: float
    num_threads: float


class Looks:
    """What processes held after a number of requests."""

    def __init__(self) -> None:
        self._nums: list[int] = []
        self.holdings: dict[str, list[Holding]] = {}

    def add(self, num_requests: int, holdings: Mapping[str, Holding]) -> None:
        """One look. Every one has to be at the same processes."""
        self._nums.append(num_requests)
        for name, held in holdings.items():
            self.holdings.setdefault(name, []).append(held)
        assert all(len(held) == len(self._nums) for held in self.holdings.values()), "a process came or went"

    def slopes(self) -> dict[str, Slope]:
        """By process."""
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
    """The same without the largest of its steps, which may be a sandbox process that was started when needed, and
    shows in the slope if it comes in the very middle."""
    steps = [after - before for before, after in pairwise(counts)]
    at = max(range(len(steps)), key=steps.__getitem__)
    return [count - steps[at] * (i > at) for i, count in enumerate(counts)]


def complaints(slopes: Mapping[str, Slope]) -> list[str]:
    """What grows."""
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
    """A request of each kind, and the status that it has to get. `i`: no two rounds are alike."""
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
    """A client that asks for much and leaves when it has seen the first of it."""
    connection = await connect(port, completion(4000, is_stream=True, prompt=f"{i} is a number"))
    await asyncio.get_running_loop().sock_recv(connection, 1)
    leave(connection, is_reset=bool(i % 2))


async def send(server: Server, first: int, num: int) -> int:
    """`num` requests of all kinds or a few more, `first` of which is the number; the number after the last."""
    i, num_left = first, num
    limit = asyncio.Semaphore(_CONCURRENCY)

    async def one(request: bytes, status: int) -> Answer:
        async with limit:
            answer = await ask(server.port, request, _LIMIT_S)
        if answer.status != status:
            raise SystemExit(f"{answer.status} instead of {status}: {request[:300]!r} {answer.body[:300]!r}")
        return answer

    async def gone(i: int) -> None:
        async with limit:
            await hang_up(server.port, i)

    async with asyncio.TaskGroup() as group:
        while num_left > 0:
            round = kinds(i)
            for request, status in round:
                group.create_task(one(request, status))
            group.create_task(gone(i))
            i += 1
            num_left -= len(round) + 1
    return i


async def watch(server: Server, num_requests: int, num_looks: int) -> Looks:
    """Looks while so many requests are served."""
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
    parser.add_argument("--requests", type=int, default=20_000, help="after those that warm up")
    parser.add_argument("--looks", type=int, default=20, help="at what is held meanwhile")
    parser.add_argument("--json", type=Path, default=Path("tests/stress/results/leak.json"), help="where to write")
    arguments = parser.parse_args(argv)
    facts = machine()
    # Little KV memory, so that what is known of cached prefixes has reached its bound when the first look is taken.
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
