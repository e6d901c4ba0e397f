"""The cost of metrics: a page of /metrics, compared with prometheus_client, and the counters of one step.

`python -m pagewire.bench.serve.metrics` prints microseconds of CPU time (median and spread over repetitions).
"""

import argparse
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from prometheus_client import CollectorRegistry, Metric, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from ...api.gateway.gateway import Gateway
from ...api.gateway.metrics import Metrics
from ...config.config import Config, MachineFacts, ModelFacts
from ...config.resolve import resolve
from ...engine.core.stats import Counters
from ...ipc.messages import Pulse, Snapshot
from ...ipc.reports import SECONDS, Histogram
from ...procs.step_times import StepTimes
from ..report import Row, machine, print_table, write_json


def cpu_us(work: Callable[[], object], number: int) -> float:
    """Mean microseconds of CPU time per call."""
    started = time.process_time()
    for _ in range(number):
        work()
    return (time.process_time() - started) / number * 1e6


def page() -> Metrics:
    """The metrics of a server whose processes have all reported."""
    gateway = Gateway(lambda message: None)
    gateway.handle([Snapshot(0, 0, 0, 0, 0, 0, 0, 0, 0, 0.0, histograms=StepTimes().report())])
    gateway.handle([Pulse(name, Histogram(SECONDS).report()) for name in ("api", "tokenizer", "core", "detokenizer")])
    facts = ModelFacts(
        path="m", name="m", max_position=64, vocab_size=320, eos_token_ids=(2,), checkpoint_dtype="float32"
    )
    return Metrics(gateway, resolve(Config(), facts, MachineFacts(num_cores=1)))


class Parsed(Collector):
    """The families of a page, made in advance, so that only the library's formatting is measured."""

    def __init__(self, text: str) -> None:
        self._families = list(text_string_to_metric_families(text))

    def collect(self) -> Iterable[Metric]:
        return self._families


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--repeat", type=int, default=5, help="repetitions")
    parser.add_argument("--json", type=Path, default=Path("bench/results/metrics.json"), help="where to write")
    arguments = parser.parse_args(argv)
    facts = machine()
    metrics, counters, times = page(), Counters(), StepTimes()
    registry = CollectorRegistry()
    registry.register(Parsed(metrics.render().decode()))

    def step() -> None:
        counters.planned(256, 0)
        started = time.monotonic()
        times.answered(0.01, 0.011)
        times.handled(1, time.monotonic() - started)

    ways: tuple[tuple[str, Callable[[], object], int], ...] = (
        ("page", metrics.render, 200),
        ("page by the library", lambda: generate_latest(registry), 50),
        ("counting of a step", step, 20_000),
    )
    rows = [Row(name) for name, _, _ in ways]
    for _ in range(arguments.repeat):
        for row, (_, work, number) in zip(rows, ways, strict=True):
            row.add(**{"CPU µs": cpu_us(work, number)})
    print_table(rows)
    write_json(arguments.json, "metrics", rows, facts, {"lines": metrics.render().count(b"\n")})


if __name__ == "__main__":
    main()
