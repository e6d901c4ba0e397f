"""The cost of a router in front of an engine, and what happens to streams when one of two engines is killed.

`python -m pagewire.bench.serve.route` first compares streams through the router with streams directly to an engine with
a null worker: tokens per second, the router's CPU time per token, and the latency of a request for one token. Then it
repeatedly kills one of two engines, with all its processes, during many streams, half of them greedy and half sampled
with a seed, and starts it again. Every stream must have the same text, token ids, log-probabilities and usage as
without a kill. With `--engines 4,16,64` it also measures what one router carries with so many engines behind it
(`route_scale`), each of which is one process of about 20 MB.
"""

import argparse
import asyncio
import statistics
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import aiohttp

from ...engine.checkpoint.source import locate
from ...engine.text.tokenizer import load_tokenizer
from ...tools.servers import ROUTE, Server
from ..report import Row, machine, print_table, write_json
from .cheap_client import chat_body
from .frontend import Engine, plain_ids, serving, stream
from .route_scale import Load, draw, scale
from .route_streams import Body, Told, bodies, differences, read_streams, wait_until_all_ready


def overhead(*, num_streams: int, num_tokens: int, step_ms: float, num_single: int, repeat: int) -> list[Row]:
    """Measures the same streams directly to an engine and through a router."""
    folder, _ = locate("", None)
    tokenizer = load_tokenizer(folder)
    ids = plain_ids(tokenizer)
    text = tokenizer.decode([ids[i % len(ids)] for i in range(num_tokens)])
    rows = [Row("straight to the engine"), Row("through the router")]
    with (
        serving(folder, ids, num_streams=num_streams, step_ms=step_ms) as engine,
        Server(None, "--engines", engine.url, "--no-access-log", command=ROUTE) as router,
    ):
        for i in range(repeat + 1):
            for row, url in zip(rows, (engine.url, router.url), strict=True):
                used = row if i else Row("warm up")
                before = sum(router.supervisor.cpu_times()[:2])
                stream(Engine(url, engine.processes), used, num_streams=num_streams, num_tokens=num_tokens, text=text)
                spent = sum(router.supervisor.cpu_times()[:2]) - before
                used.add(**{"router µs": 1e6 * spent / (num_streams * num_tokens)})
                used.add(**{"one token ms": asyncio.run(_one_token_ms(url, num_single))})
    return rows


async def _one_token_ms(url: str, num: int) -> float:
    """The median latency of `num` requests for one token, one after another."""
    seconds = []
    headers = {"Content-Type": "application/json"}
    async with aiohttp.ClientSession() as session:
        for _ in range(num):
            started = time.perf_counter()
            async with session.post(f"{url}/v1/chat/completions", data=chat_body(1), headers=headers) as response:
                await response.read()
            seconds.append(time.perf_counter() - started)
    return 1000 * statistics.median(seconds)


def kills(*, num_streams: int, num_tokens: int, num_rounds: int) -> Row:
    """Kills the engines in turn during streams. Raises SystemExit if a stream is wrong."""
    asked = bodies(num_streams, num_tokens)
    row = Row(f"{num_streams} streams, an engine killed")
    with ExitStack() as stack:
        engines = [stack.enter_context(Server()) for _ in range(2)]
        urls = ",".join(engine.url for engine in engines)
        with Server(None, "--engines", urls, "--no-access-log", command=ROUTE) as router:
            expected = asyncio.run(read_streams(engines[0].url, asked, [0]))
            if wrong := [told.error for told in expected if told.error]:
                raise SystemExit(f"a stream failed without a kill: {wrong[0]}")
            for i in range(num_rounds):
                victim = engines[i % 2]
                num_events = sum(map(sum, ([len(text) for text in told.texts] for told in expected)))
                share = 0.2 + 0.6 * (i % 7) / 7
                started = time.perf_counter()
                told = asyncio.run(killed_beneath(router, victim, asked, int(share * num_events)))
                row.add(seconds=time.perf_counter() - started)
                if wrong := differences(expected, told):
                    raise SystemExit(
                        f"round {i}: {len(wrong)} of {num_streams} streams are wrong:\n" + "\n".join(wrong)
                    )
                victim.start().wait_ready()
                wait_until_all_ready(router, 2)
            metrics = router.metrics()
            resumed = metrics["pagewire_router_resumes_total"], metrics["pagewire_router_resumed_tokens_total"]
            row.add(**{"streams resumed": resumed[0], "tokens resumed": resumed[1]})
    return row


async def killed_beneath(router: Server, victim: Server, asked: Sequence[tuple[str, Body]], after: int) -> list[Told]:
    """Reads the streams, and kills `victim` after that many events."""
    count = [0]
    reading = asyncio.ensure_future(read_streams(router.url, asked, count))
    while count[0] < after and not reading.done():
        await asyncio.sleep(0.005)
    await asyncio.to_thread(victim.kill)
    return await reading


def measure_scale(arguments: argparse.Namespace) -> list[Row]:
    """A row for each of `--engines`."""
    folder, _ = locate("", None)
    tokenizer = load_tokenizer(folder)
    ids = plain_ids(tokenizer)
    load = Load(
        folder=folder,
        ids=ids,
        text=tokenizer.decode([ids[i % len(ids)] for i in range(arguments.tokens)]),
        num_streams=arguments.streams,
        num_tokens=arguments.tokens,
        num_requests=arguments.requests,
    )
    repeat = max(1, arguments.repeat)
    return [scale(load, num, step_ms=arguments.step_ms, repeat=repeat) for num in arguments.engines]


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(",")))


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--streams", type=int, default=64, help="at once")
    parser.add_argument("--tokens", type=int, default=300, help="of each stream")
    parser.add_argument("--rounds", type=int, default=20, help="kills of a whole engine")
    parser.add_argument("--repeat", type=int, default=3, help="repetitions of the comparison; 0: none")
    parser.add_argument("--step-ms", type=float, default=4.0, help="of the null worker")
    parser.add_argument(
        "--engines", type=_numbers, default=(), help="numbers of engines with which it is measured: 4,16,64"
    )
    parser.add_argument("--requests", type=int, default=2000, help="for one token, with each number of engines")
    parser.add_argument("--plots", type=Path, default=Path("docs/images"), help="folder for the figure")
    parser.add_argument("--json", type=Path, default=Path("bench/results/route.json"), help="where to write")
    arguments = parser.parse_args(argv)
    facts = machine()
    rows: list[Row] = []
    if arguments.repeat:
        rows = overhead(
            num_streams=arguments.streams,
            num_tokens=arguments.tokens,
            step_ms=arguments.step_ms,
            num_single=100,
            repeat=arguments.repeat,
        )
        print_table(rows)
    if arguments.rounds:
        rows.append(kills(num_streams=arguments.streams, num_tokens=arguments.tokens, num_rounds=arguments.rounds))
        print_table(rows[-1:])
    if arguments.engines:
        scaled = measure_scale(arguments)
        print_table(scaled)
        draw(arguments.plots / "route_scale.png", arguments.engines, scaled)
        rows += scaled
    names = ("streams", "tokens", "rounds", "repeat", "step_ms", "engines", "requests")
    settings = {name: getattr(arguments, name) for name in names}
    write_json(arguments.json, "a router", rows, facts, settings)


if __name__ == "__main__":
    main()
