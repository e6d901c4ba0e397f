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
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from itertools import pairwise
from urllib.parse import urlsplit

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


async def stream(url: str, model: str, prompt: list[int], num_tokens: int) -> list[float]:
    """Reads one streamed completion. Returns the time of sending, then the times of its events."""
    parts = urlsplit(url)
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
    body = json.dumps(
        {
            "model": model,
            "prompt": prompt,
            "max_tokens": num_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
        }
    ).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {parts.netloc}\r\nContent-Type: application/json\r\n"
    times = [time.perf_counter()]
    writer.write(f"{head}Content-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode() + body)
    try:
        status = await reader.readline()
        if b" 200 " not in status:
            raise SystemExit(f"the server answered {status!r}: {await reader.read()!r}")
        async for line in reader:
            if line.startswith(b"data: {"):
                times.append(time.perf_counter())
            elif line.startswith(b"data: [DONE]"):
                return times
    finally:
        writer.close()
    raise SystemExit("a stream ended early")


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

    def record(row: Row, seconds: float, streams: list[list[float]]) -> None:
        first = [times[1] - times[0] for times in streams]
        gaps = [b - a for times in streams for a, b in pairwise(times[1:])]
        figures = {"seconds": seconds, "output tok/s": num * length / seconds}
        for label, values in (("TTFT", first), ("ITL", gaps)):
            if values:
                figures |= {f"{label} p{p} ms": percentile(values, p) * 1e3 for p in (50, 99)}
        row.add(**figures)

    with serving(arguments) as url:
        with urllib.request.urlopen(f"{url}/v1/models", timeout=10) as response:
            model = json.load(response)["data"][0]["id"]

        async def at_once() -> list[list[float]]:
            return await asyncio.gather(*(stream(url, model, prompt, length) for prompt in batch))

        async def in_turn() -> list[list[float]]:
            return [await stream(url, model, prompt, length) for prompt in batch]

        def measure(row: Row, work: Callable[[], Coroutine[None, None, list[list[float]]]]) -> Callable[[], None]:
            def run() -> None:
                started = time.perf_counter()
                streams = asyncio.run(work())
                record(row, time.perf_counter() - started, streams)

            return run

        asyncio.run(at_once())  # warm up
        repeat(arguments.repeat, measure(together, at_once), measure(alone, in_turn))

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
