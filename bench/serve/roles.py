"""Long prompts beside streams: a prefill and a decode engine against two engines that do both.

`python -m pagewire.bench.serve.roles` starts two engines and a router, keeps short prompts with long outputs streaming,
and sends long prompts, each different, one after the other. It measures the time to the first token of the long
prompts, the time between two tokens of the streams while long prompts are computed, how many tokens' KV was loaded from
the other engine and in how many bytes, how many prompt tokens were computed more than once (by both engines, or again
after a load that failed), and how many prompts were computed elsewhere.

Then it sends long prompts to both engines by itself, with a relay between them that counts bytes: which share of a
prompt's KV had left the prefill engine when its client had the end of the prompt, the first token, and how long after
that the last byte came. Two engines on one machine share its cores, so only the relation of two runs says something.
"""

import argparse
import asyncio
import socket
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from pathlib import Path

import aiohttp

from ...tools.servers import ROUTE, Server
from ..report import Row, machine, percentile, print_table, write_json
from .relay import Relay, relay
from .route_streams import wait_until_all_ready

_LEAST_BYTES = 1 << 16  # of a prompt's KV
_SENTENCE = "Count from 1 to 9, then say the alphabet. "


@contextmanager
def _fleet(model: str | None, flags: Sequence[str], *, has_roles: bool) -> Iterator[tuple[list[Server], Server, int]]:
    """Two engines, a router that knows both, and the port of the prefill engine's KV, or 0."""
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="pw-"))
        own: list[list[str]] = [[], []]
        port = 0
        if has_roles:
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", 0))
                port = probe.getsockname()[1]
            keys = f"key-file={folder}/keys"
            own[0] = ["--kv-connector", f"p2p,serve=tcp://127.0.0.1:{port},size=1G,{keys},role=prefill"]
            waits = "timeout_ms=2000,wait_ms=10000,fetch_timeout_ms=10000"
            own[1] = ["--kv-connector", f"p2p,peer=named,{keys},role=decode,{waits}", "--kv-peers", "127.*"]
        named = [] if model is None else [model]
        engines = [stack.enter_context(Server(None, *named, *flags, *some)) for some in own]
        urls = ",".join(engine.url for engine in engines)
        router = stack.enter_context(Server(None, "--engines", urls, "--no-access-log", command=ROUTE))
        for server in (*engines, router):
            server.wait_ready()
        wait_until_all_ready(router, 2)
        yield engines, router, port


async def _read(session: aiohttp.ClientSession, url: str, prompt: str, num_tokens: int, found: list[float]) -> None:
    """Adds when the request was sent, and when each of its events with text came (s)."""
    body = {"prompt": prompt, "max_tokens": num_tokens, "stream": True, "ignore_eos": True, "temperature": 0}
    found.append(time.perf_counter())
    async with session.post(f"{url}/v1/completions", json=body) as response:
        response.raise_for_status()
        async for line in response.content:
            if line.startswith(b"data: {") and b'"text":""' not in line:
                found.append(time.perf_counter())


async def _streamed(
    session: aiohttp.ClientSession, engines: Sequence[Server], relayed: Relay, prompt: str
) -> tuple[float, float] | None:
    """(share of a prompt's KV that had left when the prefill engine had answered, seconds from then to the last byte);
    None: the decode engine has computed it itself."""
    sources = (
        {"remote_decoder": {"kv_request_id": "1"}},
        {"remote_prefiller": {"kv_request_id": "1", "remote_host": "127.0.0.1", "remote_port": relayed.port}},
    )
    ends: list[float] = []

    async def ask(url: str, source: object) -> None:
        body = {"prompt": prompt, "max_tokens": 1, "temperature": 0, "kv_transfer_params": source}
        async with session.post(f"{url}/v1/completions", json=body) as response:
            response.raise_for_status()
            await response.read()
        ends.append(time.perf_counter())

    before = len(relayed.passed)
    await asyncio.gather(*(ask(engine.url, source) for engine, source in zip(engines, sources, strict=True)))
    passed = [(at, num) for at, num in relayed.passed[before:] if at <= ends[1]]
    total, ended = sum(num for _, num in passed), ends[0]
    if total < _LEAST_BYTES:
        return None
    return sum(num for at, num in passed if at <= ended) / total, max(0.0, passed[-1][0] - ended)


async def _transfers(
    engines: Sequence[Server], relayed: Relay, *, num_prompts: int, length: int, seed: int
) -> list[tuple[float, float]]:
    """`_streamed` of long prompts, one after the other."""
    found = []
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None)) as session:
        for i in range(num_prompts):
            prompt = f"Piece {seed} {i}. " + _SENTENCE * (length // 12)
            if (one := await _streamed(session, engines, relayed, prompt)) is not None:
                found.append(one)
    return found


async def _num_tokens(session: aiohttp.ClientSession, engine: str, prompts: Sequence[str]) -> int:
    """Of these prompts together."""
    total = 0
    for prompt in prompts:
        async with session.post(f"{engine}/tokenize", json={"prompt": prompt}) as response:
            response.raise_for_status()
            total += (await response.json())["count"]
    return total


async def _mix(
    url: str, engine: str, *, num_streams: int, num_prompts: int, length: int, seed: int
) -> tuple[list[float], list[float], int]:
    """(seconds to the first token of each long prompt, seconds between two tokens of the streams meanwhile, tokens of
    all prompts). engine: one that can count tokens."""
    timeout = aiohttp.ClientTimeout(total=None)
    short = [f"Count from {seed + i} to 900" for i in range(num_streams)]
    long = [f"Item {seed} {i}. " + _SENTENCE * (length // 12) for i in range(num_prompts)]
    async with aiohttp.ClientSession(timeout=timeout) as session:
        times: list[list[float]] = [[] for _ in range(num_streams)]
        streams = [
            asyncio.create_task(_read(session, url, prompt, 1000, own))
            for prompt, own in zip(short, times, strict=True)
        ]
        await asyncio.sleep(0.5)
        started, first = time.perf_counter(), []
        for prompt in long:
            own: list[float] = []
            await _read(session, url, prompt, 8, own)
            first.append(own[1] - own[0])
        ended = time.perf_counter()
        for stream in streams:
            stream.cancel()
        await asyncio.gather(*streams, return_exceptions=True)
        num_tokens = await _num_tokens(session, engine, [*short, *long])
    between = [b - a for some in times for a, b in pairwise(some[1:]) if started <= a and b <= ended]
    return first, between, num_tokens


def measure(
    model: str | None, flags: Sequence[str], *, num_streams: int, num_prompts: int, length: int, repeat: int
) -> list[Row]:
    rows = []
    for name, has_roles in (("two engines that do both", False), ("prefill + decode", True)):
        row = Row(name)
        rows.append(row)
        with _fleet(model, flags, has_roles=has_roles) as (engines, router, port), ExitStack() as stack:
            relayed = stack.enter_context(relay(port)) if port else None
            for i in range(repeat + 1):
                before = [engine.metrics() for engine in engines]
                first, between, num_tokens = asyncio.run(
                    _mix(
                        router.url,
                        engines[0].url,
                        num_streams=num_streams,
                        num_prompts=num_prompts,
                        length=length,
                        seed=1000 * i + 7,
                    )
                )
                if not i:
                    continue  # it warms up, and teaches prices
                for engine in engines:
                    engine.wait_idle()  # its counters are complete
                after = [engine.metrics() for engine in engines]
                asked, cached, loaded = (
                    _more(before, after, f"pagewire:{name}_total")
                    for name in ("prompt_tokens", "prefix_cache_hits", "external_prefix_cache_hits")
                )
                row.add(
                    **{
                        "TTFT p50 ms": 1000 * percentile(first, 50),
                        "TTFT p99 ms": 1000 * percentile(first, 99),
                        "ITL p50 ms": 1000 * percentile(between, 50) if between else 0.0,
                        "ITL p99 ms": 1000 * percentile(between, 99) if between else 0.0,
                        "tokens loaded": loaded,
                        "MB loaded": _more(before, after, "pagewire:kv_tier_loaded_bytes_total") / 1e6,
                        "tokens computed again": asked - cached - loaded - num_tokens,
                    }
                )
                if relayed is not None:
                    sent = asyncio.run(
                        _transfers(engines, relayed, num_prompts=num_prompts, length=length, seed=1000 * i + 7)
                    )
                    row.add(
                        **{
                            "KV sent before the prompt's end, %": 100 * percentile([one for one, _ in sent], 50),
                            "last byte after it, p50 ms": 1000 * percentile([tail for _, tail in sent], 50),
                            "prompts sent": len(sent),
                        }
                    )
            legs = router.metric("pagewire_router_prefill_legs_total") / (repeat + 1)
            row.add(**{"prompts computed elsewhere": legs})
    return rows


def _more(before: Sequence[dict[str, float]], after: Sequence[dict[str, float]], name: str) -> float:
    return sum(late.get(name, 0.0) - early.get(name, 0.0) for early, late in zip(before, after, strict=True))


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--model", help="a model instead of the demo model")
    parser.add_argument("--streams", type=int, default=8, help="beside the long prompts")
    parser.add_argument("--prompts", type=int, default=20, help="long ones, of each repetition")
    parser.add_argument("--length", type=int, default=1500, help="tokens of a long prompt, about")
    parser.add_argument("--repeat", type=int, default=3, help="repetitions of each setup")
    parser.add_argument("--flags", default="", help="further flags of both engines, with spaces")
    parser.add_argument("--json", type=Path, default=Path("bench/results/roles.json"), help="where to write")
    arguments = parser.parse_args(argv)
    facts = machine()
    flags = ["--no-access-log", "--kv-cache-memory", "128M", "--threads", "1", *arguments.flags.split()]
    rows = measure(
        arguments.model,
        flags,
        num_streams=arguments.streams,
        num_prompts=arguments.prompts,
        length=arguments.length,
        repeat=arguments.repeat,
    )
    print_table(rows)
    settings = {name: getattr(arguments, name) for name in ("streams", "prompts", "length", "repeat", "flags")}
    write_json(arguments.json, "prefill and decode on different engines", rows, facts, settings)


if __name__ == "__main__":
    main()
