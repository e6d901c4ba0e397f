"""The effect of one very long prompt on running streams, with and without `--itl-target-ms`.

`python -m pagewire.bench.engine.long_prompt` runs 32 streams and sends a prompt of 32k tokens. It prints the streams'
inter-token latency during the prefill and the prompt's time to first token, says whether the 99th percentile stayed
within 1.3 times the target, writes JSON and draws the distribution.

The target is `--times` times the streams' latency without a prompt, which is measured first, so it depends on the
machine. It must be larger than that latency, because a step with part of a prompt always costs more than one without.
The model is the demo model with a longer declared context. Each stream is a series of short requests, so that the
length of their contexts stays the same during the prefill.
"""

import argparse
import tempfile
import time
from itertools import pairwise
from pathlib import Path

import torch

from ...engine.checkpoint.source import locate
from ..plots import distribution
from ..report import Row, machine, percentile, print_table, write_json
from ..workload import prompts
from .in_process import Engine, Timed, stretched

_ALLOWED = 1.3  # times the target
_STREAM_TOKENS = 128  # of one request of a stream


class Streams:
    """A constant number of streams: where one request ends, the next begins."""

    def __init__(self, engine: Engine, batch: list[list[int]]) -> None:
        self._engine = engine
        self._prompts = batch
        # Spread over the lengths, so that they do not all end in one step.
        self._running = [
            engine.send(prompt, _STREAM_TOKENS * (i + 1) // len(batch) + 1) for i, prompt in enumerate(batch)
        ]
        self._ended: list[Timed] = []

    def run(self, until: "Timed | float") -> None:
        """Runs until a request has its first token, or until a time of `time.perf_counter`."""

        def done() -> bool:
            for i, request in enumerate(self._running):
                if request.ended:
                    self._ended.append(request)
                    self._running[i] = self._engine.send(self._prompts[i], _STREAM_TOKENS)
            return bool(until.times) if isinstance(until, Timed) else time.perf_counter() >= until

        self._engine.run(until=done)

    def gaps_ms(self, since: float) -> list[float]:
        """Times between consecutive tokens of a request that came after `since`."""
        gaps = []
        for request in [*self._ended, *self._running]:
            later = [t for t in request.times if t >= since]
            gaps += [(b - a) * 1e3 for a, b in pairwise(later)]
        return gaps

    def end(self) -> None:
        self._engine.cancel(self._running)


def plain_ms(engine: Engine, batch: list[list[int]], seconds: float) -> float:
    """The streams' median inter-token latency without a long prompt."""
    streams = Streams(engine, batch)
    streams.run(time.perf_counter() + seconds / 2)  # every stream is past its prompt
    started = time.perf_counter()
    streams.run(started + seconds)
    gaps = streams.gaps_ms(started)
    streams.end()
    return percentile(gaps, 50)


def measure(engine: Engine, batch: list[list[int]], prompt: list[int]) -> tuple[dict[str, float], list[float]]:
    """(figures, the streams' inter-token latencies in ms) from the prompt's arrival to its first token."""
    streams = Streams(engine, batch)
    streams.run(time.perf_counter() + 1.0)
    request = engine.send(prompt, 1)
    streams.run(request)
    gaps = streams.gaps_ms(request.sent)
    streams.end()
    figures = {f"ITL p{p} ms": percentile(gaps, p) for p in (50, 99)}
    return {**figures, "ITL max ms": max(gaps), "TTFT of the prompt s": request.first_ms / 1e3}, gaps


def main(argv: list[str] | None = None) -> None:
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    flags.add_argument("--streams", type=int, default=32, help="number of streams")
    flags.add_argument("--prompt-len", type=int, default=32768, help="tokens of the long prompt")
    flags.add_argument("--times", type=float, default=3.0, help="the target, in latencies of the streams alone")
    flags.add_argument("--threads", type=int, default=1, help="torch threads")
    flags.add_argument("--repeat", type=int, default=3, help="repetitions")
    flags.add_argument("--json", type=Path, default=Path("bench/results/long_prompt.json"), help="where to write")
    flags.add_argument("--plot", type=Path, default=Path("docs/images/long_prompt.png"), help="where to draw")
    flags.add_argument("--quick", action="store_true", help="a small prompt, once, as a test of the program")
    arguments = flags.parse_args(argv)
    if arguments.quick:
        arguments.streams, arguments.prompt_len, arguments.repeat = 8, 4096, 1
    num, length = arguments.streams, arguments.prompt_len
    facts = machine()
    folder, name = locate("", None)
    batch = prompts(folder, num, 16)
    long = prompts(folder, 1, length, seed=1)[0]
    with tempfile.TemporaryDirectory(prefix="pagewire-bench-") as temporary:
        model = stretched(folder, Path(temporary) / "model", length + 1024)
        options = {
            "dtype": "float32",
            "threads": arguments.threads,
            "enable_prefix_caching": False,
            "kv_cache_memory": (length + num * 256 + 1024) * 4096,  # bytes of the demo model's KV of one token
        }
        torch.set_num_threads(arguments.threads)
        free = Engine(model, **options)
        plain = plain_ms(free, batch, 0.5 if arguments.quick else 5.0)
        target = plain * arguments.times
        bound = Engine(model, **options, itl_target_ms=target)
        measure(bound, batch, long[: length // 4])  # its cost model learns from real steps
    rows = {"without a target": free, f"--itl-target-ms {target:.1f}": bound}
    table = {title: Row(title) for title in rows}
    all_gaps: dict[str, list[float]] = {title: [] for title in rows}
    for _ in range(arguments.repeat):
        for title, engine in rows.items():
            figures, gaps = measure(engine, batch, long)
            table[title].add(**figures)
            all_gaps[title] += gaps
    print(f"{name}, {num} streams of their own {plain:.1f} ms, one prompt of {length}, {arguments.threads} thread(s)")
    print_table(list(table.values()))
    p99 = table[f"--itl-target-ms {target:.1f}"].median("ITL p99 ms")
    verdict = "within" if p99 <= target * _ALLOWED else "NOT within"
    print(f"p99 {p99:.1f} ms is {verdict} {_ALLOWED} × {target:.1f} ms = {target * _ALLOWED:.1f} ms")
    settings = {"streams": num, "prompt_len": length, "plain_ms": plain, "target_ms": target, "model": name}
    write_json(arguments.json, "a long prompt beside streams", list(table.values()), facts, settings)
    distribution(
        arguments.plot,
        f"{num} streams beside a prompt of {length:,} tokens",
        "inter-token latency, ms",
        all_gaps,
        marks={"target": target, f"{_ALLOWED} × target": target * _ALLOWED},
    )


if __name__ == "__main__":
    main()
