"""The effect of misbehaving clients on other clients and on the server.

`python -m pagewire.tests.stress.abuse` runs four parts, one after another:

- vanish: 200 clients close or reset their connections in the middle of streams and plain answers. Rows, queue and KV
  memory must be free within two seconds, and no more descriptors may be open than before.
- stalled: some clients stop reading their streams. Other streams must not slow down by more than a tenth, compared with
  the same number of clients that read, and no stalled stream may hold more than 1 MB of memory.
- heads: connections that send the head of a request byte by byte. Each must be closed at the limit, and other requests
  must be answered meanwhile.
- idle: 10,000 connections that send nothing. They must not cost 200 MB, and requests must take as long as before.

It prints a table for each part, writes JSON, and ends with exit code 1 if a guarantee was broken.
"""

import argparse
import asyncio
import socket
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import uvloop

from ...bench.report import Row, machine, print_table, write_json
from ...tools.servers import MB, Server
from .client import ask, closed_loop, completion, connect, leave, serving

FREE_LIMIT_S = 2.0
MAX_SLOWDOWN = 1.1  # of the median, with stalled readers
MAX_STALLED_MB = 1.0
HEAD_SLACK_S = 2.0  # over --head-timeout-s
MAX_IDLE_MB = 200.0
MAX_IDLE_SLOWDOWN = 1.05
_LIMIT_S = 120.0
_FDS_LIMIT_S = 30.0  # until the descriptors are counted as left open
_LEAST_DRIP_S = 60.0  # a head that is never given up takes longer than any slack of a busy machine
_LONG = 8000  # tokens of answers that are never read to the end
_NUM_BEFORE_STALL = 1000  # tokens of each stream, more than the buffers between two sockets hold
_SPARE_FDS = 4  # tolerance between two counts, for the server's timers and files


async def until(reached: Callable[[], bool], what: str) -> None:
    """Returns when `reached()` is true. Raises SystemExit after `_LIMIT_S`."""
    deadline = time.monotonic() + _LIMIT_S
    while not await asyncio.to_thread(reached):
        if time.monotonic() > deadline:
            raise SystemExit(f"not within {_LIMIT_S:g} s: {what}")
        await asyncio.sleep(0.05)


async def vanish(server: Server, row: Row, num: int) -> list[str]:
    await closed_loop(server.port, [completion(8, is_stream=bool(i % 2)) for i in range(16)], 8, _LIMIT_S)  # warms up
    server.wait_idle()
    before = server.holdings()["api"].num_fds
    loop = asyncio.get_running_loop()
    requests = [completion(_LONG, is_stream=i % 4 < 2) for i in range(num)]
    connections = [await connect(server.port, request) for request in requests]
    await asyncio.gather(*(loop.sock_recv(c, 1) for i, c in enumerate(connections) if i % 4 < 2))

    def num_begun() -> float:
        load = server.load()
        return load["num_running"] + load["num_waiting"]  # when the KV memory is full, some of them wait again

    await until(lambda: num_begun() == num, "the server has all requests")
    for i, connection in enumerate(connections):
        leave(connection, is_reset=bool(i % 2))
    began = time.monotonic()
    server.wait_idle()
    deadline = time.monotonic() + _FDS_LIMIT_S
    while (more_fds := server.holdings()["api"].num_fds - before) > _SPARE_FDS and time.monotonic() < deadline:
        await asyncio.sleep(0.05)
    seconds = time.monotonic() - began
    row.add(**{"clients": num, "free after s": seconds, "descriptors more": more_fds})
    return [f"it took {seconds:.2f} s until all was free"] * (seconds > FREE_LIMIT_S) + [
        f"{more_fds} descriptors are still open"
    ] * (more_fds > _SPARE_FDS)


def unsent_bytes(port: int) -> int:
    """Bytes in the kernel's send queues of all connections of this port."""
    local = f":{port:04X}"
    lines = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return sum(int(fields[4].partition(":")[0], 16) for fields in lines if fields[1].endswith(local))


async def pace_beside(server: Server, num_others: int, num: int, num_tokens: int, *, stalled: bool) -> list[float]:
    """Milliseconds per token of `num` streams while other clients read or stall, then the MB that each other holds."""
    before = server.holdings()["api"].num_bytes
    num_generated = server.metric("pagewire:generation_tokens_total")
    buffer = 4096 if stalled else None
    others = [
        await connect(server.port, completion(_LONG, is_stream=True), receive_buffer=buffer) for _ in range(num_others)
    ]
    loop = asyncio.get_running_loop()

    async def read(connection: socket.socket) -> None:
        while await loop.sock_recv(connection, 1 << 18):
            pass

    readers = [] if stalled else [asyncio.create_task(read(connection)) for connection in others]
    enough = num_generated + num_others * _NUM_BEFORE_STALL
    await until(lambda: server.metric("pagewire:generation_tokens_total") > enough, "the other streams have begun")
    request = completion(num_tokens, is_stream=True)
    answers = await asyncio.gather(*(ask(server.port, request, _LIMIT_S) for _ in range(num)))
    assert all(answer.status == 200 for answer in answers), [answer.status for answer in answers]
    held = server.holdings()["api"].num_bytes - before + unsent_bytes(server.port)
    for reader in readers:
        reader.cancel()
    with suppress(asyncio.CancelledError):
        await asyncio.gather(*readers)
    for connection in others:
        leave(connection, is_reset=True)
    await asyncio.to_thread(server.wait_idle)
    return [*(1000 * answer.seconds / num_tokens for answer in answers), held / MB / num_others]


async def stalled(server: Server, row: Row, num_others: int, num: int, num_tokens: int, rounds: int) -> list[str]:
    """Measures reading and stalled clients in turn, so that noise affects both."""
    paces: dict[bool, list[float]] = {False: [], True: []}
    held_mb = 0.0
    for _ in range(rounds):
        for is_stalled in (False, True):
            *found, mb = await pace_beside(server, num_others, num, num_tokens, stalled=is_stalled)
            paces[is_stalled] += found
            held_mb = max(held_mb, mb) if is_stalled else held_mb
    fast, slow = (statistics.median(paces[is_stalled]) for is_stalled in (False, True))
    row.add(
        **{"readers beside": num_others, "ms/token beside readers": fast, "beside stalled ones": slow},
        **{"ratio": slow / fast, "MB held by each": held_mb},
    )
    return [f"beside stalled readers a token took {slow / fast:.2f} times as long"] * (slow / fast > MAX_SLOWDOWN) + [
        f"a stalled stream held {held_mb:.2f} MB"
    ] * (held_mb > MAX_STALLED_MB)


async def heads(server: Server, row: Row, num: int, limit_s: float) -> list[str]:
    async def drip(connection: socket.socket) -> float:
        loop, began = asyncio.get_running_loop(), time.monotonic()
        closed = asyncio.create_task(loop.sock_recv(connection, 1))
        while not closed.done() and time.monotonic() - began < max(10 * limit_s, _LEAST_DRIP_S):
            with suppress(OSError):
                await loop.sock_sendall(connection, b"a")
            await asyncio.wait({closed}, timeout=limit_s / 20)
        with suppress(OSError):
            await closed
        connection.close()
        return time.monotonic() - began

    connections = [await connect(server.port, b"GET /health HTTP/1.1\r\nx: ") for _ in range(num)]
    dripping = asyncio.gather(*map(drip, connections))
    answers = []
    while not dripping.done():
        answers.append(await ask(server.port, completion(8), _LIMIT_S))
    slowest = max(await dripping)
    num_wrong = sum(answer.status != 200 for answer in answers)
    row.add(
        **{"connections": num, "closed after s": slowest, "requests beside": len(answers), "not answered": num_wrong},
        **{"slowest s": max(answer.seconds for answer in answers)},
    )
    return [f"a head was waited for {slowest:.1f} s"] * (slowest > limit_s + HEAD_SLACK_S) + [
        f"{num_wrong} requests beside slow heads were not answered"
    ] * bool(num_wrong)


async def idle(server: Server, row: Row, num: int, num_requests: int, rounds: int) -> list[str]:
    """Measures with and without idle connections in turn."""

    async def median_s() -> float:
        answers = await closed_loop(server.port, [completion(8)] * num_requests, 1, _LIMIT_S)
        assert all(answer.status == 200 for answer in answers)
        return statistics.median(answer.seconds for answer in answers)

    await median_s()  # warms up
    before = server.holdings()["api"]
    num_accepted = before.num_fds + num - _SPARE_FDS
    alone, beside, growth_mb = list[float](), list[float](), 0.0
    for _ in range(rounds):
        alone.append(await median_s())
        connections = [await connect(server.port) for _ in range(num)]
        await until(lambda: server.holdings()["api"].num_fds >= num_accepted, "all connections are accepted")
        growth_mb = max(growth_mb, (server.holdings()["api"].num_bytes - before.num_bytes) / MB)
        beside.append(await median_s())
        for connection in connections:
            connection.close()
        await until(
            lambda: server.holdings()["api"].num_fds <= before.num_fds + _SPARE_FDS, "all connections are closed"
        )
    ratio = statistics.median(beside) / statistics.median(alone)
    row.add(
        **{
            "connections": num,
            "growth MB": growth_mb,
            "request ms": 1000 * statistics.median(beside),
            "to one alone": ratio,
        }
    )
    return [f"{num} idle connections cost {growth_mb:.0f} MB"] * (growth_mb > MAX_IDLE_MB) + [
        f"beside idle connections a request took {ratio:.2f} times as long"
    ] * (ratio > MAX_IDLE_SLOWDOWN)


async def play(part: str, server: Server, row: Row, arguments: argparse.Namespace) -> list[str]:
    """Runs one part. Returns the broken promises."""
    match part:
        case "vanish":
            return await vanish(server, row, arguments.clients)
        case "stalled":
            counts = (arguments.stalled, arguments.readers, arguments.tokens, arguments.rounds)
            return await stalled(server, row, *counts)
        case "heads":
            return await heads(server, row, arguments.clients, arguments.head_timeout_s)
        case _:
            return await idle(server, row, arguments.idle, arguments.requests, arguments.rounds)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the program. 1 if a promise was broken."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parts = ("vanish", "stalled", "heads", "idle")
    parser.add_argument("--parts", nargs="+", choices=parts, default=parts, help="parts to run")
    parser.add_argument("--clients", type=int, default=200, help="clients that vanish or send slow heads; at most 256")
    parser.add_argument("--stalled", type=int, default=16, help="streams that are not read")
    parser.add_argument("--readers", type=int, default=8, help="other streams, whose speed is measured")
    parser.add_argument("--tokens", type=int, default=400, help="tokens of each of these")
    parser.add_argument("--rounds", type=int, default=3, help="measurements with and without such clients")
    parser.add_argument("--head-timeout-s", type=float, default=10.0, help="the server's --head-timeout-s")
    parser.add_argument("--idle", type=int, default=10_000, help="connections that send nothing")
    parser.add_argument("--requests", type=int, default=100, help="requests meanwhile, one after another")
    parser.add_argument("--repeat", type=int, default=3, help="repetitions, each with a new server")
    parser.add_argument("--json", type=Path, default=Path("tests/stress/results/abuse.json"), help="where to write")
    arguments = parser.parse_args(argv)
    facts, rows, broken = machine(), [Row(part) for part in arguments.parts], list[str]()
    flags = ("--head-timeout-s", str(arguments.head_timeout_s), "--timeout-keep-alive", "600", "--max-num-seqs", "256")
    for _ in range(arguments.repeat):
        with serving(*flags) as server:
            for row in rows:
                found = uvloop.run(play(row.name, server, row, arguments))
                broken += [f"{row.name}: {what}" for what in found]
    for row in rows:
        print_table([row])
    settings = {key: value for key, value in vars(arguments).items() if key != "json"}
    write_json(arguments.json, "abuse", rows, facts, settings)
    print("\n".join(broken) or "every promise was kept")
    return int(bool(broken))


if __name__ == "__main__":
    raise SystemExit(main())
