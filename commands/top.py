"""Shows a running server's requests, memory, speed and latencies, read from its /metrics every second."""

import argparse
import contextlib
import os
import select
import sys
import termios
import time
import tty
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

from ..engine.runner.memory import size
from ..errors import ConfigError, PagewireError
from .client import add_client_flags, named_server
from .metrics import Reading, cpus_used, quantile, rate, read, stage_shares

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

_WINDOW_S = 10.0  # of the latencies
_HISTORY = 60  # readings in the curve
_BLOCKS = " ▁▂▃▄▅▆▇█"
_STATES = {"busy": "█", "input": "▒", "ids": "░", "output": "╌", "plan": "·"}  # of a pipeline's stage
_KINDS = {
    "kv_used": "KV in use",
    "kv_cached": "KV cached",
    "kv_free": "KV free",
    "draft_states": "draft states",
    "host_tier": "host tier",
}  # of memory; the others are called as in /metrics
_LEAST_SHOWN = 0.01  # CPUs of a process
_LATENCIES = (
    ("time to first token", "time_to_first_token_seconds"),
    ("between tokens", "inter_token_latency_seconds"),
    ("whole request", "e2e_request_latency_seconds"),
    ("step", "step_time_seconds"),
    ("step, on the host", "step_host_time_seconds"),
)


def add_flags(parser: argparse.ArgumentParser) -> None:
    add_client_flags(parser)
    parser.add_argument("--interval", type=float, default=1.0, help="seconds between readings (default: 1)")
    parser.add_argument("--once", action="store_true", help="take two readings, print them and exit; for scripts")


def main(arguments: argparse.Namespace) -> int:
    """Returns the exit code."""
    if not 0.1 <= arguments.interval <= 3600:
        raise ConfigError("--interval must be between 0.1 and 3600 seconds.")
    server = named_server(arguments)
    screen = Screen(server.url, server.model())

    def look() -> None:
        screen.add(read(server.get("/metrics").decode(), time.monotonic()))

    look()
    if arguments.once:
        from rich.console import Console

        time.sleep(arguments.interval)
        look()
        Console().print(screen.render())
        return 0
    return _watch(screen, look, arguments.interval)


def _watch(screen: "Screen", look: Callable[[], None], interval: float) -> int:
    """Runs until q or Ctrl-C. While the server does not answer, shows the error and goes on reading."""
    from rich.console import Console
    from rich.live import Live

    console = Console()
    with (
        contextlib.suppress(KeyboardInterrupt),
        _keys() as next_key,
        Live(screen.render(), console=console, screen=True, auto_refresh=False) as live,
    ):
        while next_key(interval) not in ("q", "Q"):
            try:
                look()
            except PagewireError as error:
                screen.trouble = str(error)
            live.update(screen.render(), refresh=True)
    return 0


@contextlib.contextmanager
def _keys() -> Iterator[Callable[[float], str]]:
    """A function that waits a number of seconds for a key; it returns \"\" if none was pressed."""
    if not sys.stdin.isatty():
        yield _sleep
        return
    before = termios.tcgetattr(sys.stdin)
    tty.setcbreak(sys.stdin)

    def next_key(timeout_s: float) -> str:
        return os.read(sys.stdin.fileno(), 1).decode(errors="replace") if _is_ready(timeout_s) else ""

    try:
        yield next_key
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)


def _sleep(timeout_s: float) -> str:
    time.sleep(timeout_s)
    return ""


def _is_ready(timeout_s: float) -> bool:
    return bool(select.select([sys.stdin], [], [], timeout_s)[0])


class Screen:
    """The display, rendered from the readings so far."""

    def __init__(self, url: str, model: str) -> None:
        self._url = url
        self._model = model
        self._readings: deque[Reading] = deque(maxlen=2 * _HISTORY)
        self._speeds: deque[float] = deque(maxlen=_HISTORY)  # generated tokens per second, between consecutive readings
        self.trouble: str | None = None  # why the last reading failed

    def add(self, reading: Reading) -> None:
        if self._readings:
            self._speeds.append(rate(self._readings[-1], reading, "generation_tokens_total"))
        self._readings.append(reading)
        self.trouble = None

    def render(self) -> "RenderableType":
        from rich.console import Group
        from rich.panel import Panel
        from rich.text import Text

        now = self._readings[-1]
        before = self._window()
        parts: list[RenderableType] = []
        if self.trouble:  # first, where a small screen shows it, too
            parts += [Text(self.trouble, style="bold red"), Text()]
        parts += [self._state(now), Text(), self._speed(before, now), Text()]
        if now.stages:
            parts += [self._stages(before, now), Text()]
        if "worker_memory_bytes/kind" in now.by_label:
            parts += [self._machine(before, now), Text()]
        parts += [self._latencies(before, now), Text()]
        if "slo_observations_total/latency_class" in now.by_label:
            parts += [self._attainment(before, now), Text()]
        parts.append(self._counts(before, now))
        return Panel(Group(*parts), title=f"{self._model} at {self._url}", subtitle="q ends", title_align="left")

    def _window(self) -> Reading:
        """The oldest reading within `_WINDOW_S`."""
        newest = self._readings[-1].at
        return next(reading for reading in self._readings if reading.at >= newest - _WINDOW_S or reading.at == newest)

    def _state(self, now: Reading) -> "Table":
        used = min(1.0, now.mean("kv_cache_usage_perc"))
        table = _table()
        table.add_row("running", f"{now.get('num_requests_running'):.0f}", "sequences in the batch")
        table.add_row("waiting", f"{now.get('num_requests_waiting'):.0f}", "sequences in the queue")
        engines = now.by_label.get("engine_ready/engine", {})
        if engines:
            down = ", ".join(number for number, is_ready in sorted(engines.items()) if not is_ready)
            table.add_row(
                "engines", f"{sum(engines.values()):.0f}", f"of {len(engines)}" + (f"; not {down}" * bool(down))
            )
        table.add_row("KV cache", f"{100 * used:.1f} %", _bar(used))
        for tier, blocks in now.by_label.get("kv_tier_blocks/tier", {}).items():
            room = now.by_label.get("kv_tier_capacity_blocks/tier", {}).get(tier, 0.0)
            table.add_row(f"tier {tier}", f"{blocks:.0f}", f"blocks of {room:.0f}" if room else "blocks")
        return table

    def _speed(self, before: Reading, now: Reading) -> "Table":
        table = _table()
        speed = self._speeds[-1] if self._speeds else 0.0
        table.add_row("generated", f"{speed:.1f}", "tokens/s")
        table.add_row("", "", curve(list(self._speeds)))
        table.add_row("prompts", f"{rate(before, now, 'prompt_tokens_total'):.1f}", "tokens/s")
        asked = now.get("prefix_cache_queries_total") - before.get("prefix_cache_queries_total")
        if asked > 0:
            hits = now.get("prefix_cache_hits_total") - before.get("prefix_cache_hits_total")
            table.add_row("from cache", f"{100 * hits / asked:.1f} %", "of these prompt tokens")
        drafted = now.get("spec_decode_num_draft_tokens_total") - before.get("spec_decode_num_draft_tokens_total")
        if drafted > 0:
            name = "spec_decode_num_accepted_tokens_total"
            table.add_row("guesses", f"{100 * (now.get(name) - before.get(name)) / drafted:.1f} %", "came true")
        return table

    def _stages(self, before: Reading, now: Reading) -> "Table":
        """A bar for each stage of a pipeline."""
        table = _table()
        for stage, shares in stage_shares(before, now).items():
            busy = f"{100 * shares['busy']:.0f} %" if shares else "idle"
            table.add_row(f"stage {stage} busy", busy, stage_bar(shares))
        names = {"input": "the stage before", "ids": "ids", "output": "the stage behind", "plan": "a plan"}
        waits = "waits for " + ", ".join(f"{_STATES[state]} {name}" for state, name in names.items())
        table.add_row("bubbles", f"{100 * now.mean('pipeline_bubble_ratio'):.0f} %", waits)
        return table

    def _machine(self, before: Reading, now: Reading) -> "Table":
        """What the engine takes of its machine: memory by kind, CPUs by process, the roof, GPUs."""
        table = _table()
        memory = now.by_label["worker_memory_bytes/kind"]
        parts = [f"{_KINDS.get(kind, kind)} {size(int(num))}" for kind, num in memory.items() if num]
        table.add_row("memory", size(int(sum(memory.values()))), ", ".join(parts))
        if cpus := cpus_used(before, now):
            busiest = sorted(cpus.items(), key=lambda item: -item[1])
            shown = ", ".join(f"{name} {used:.2f}" for name, used in busiest if used >= _LEAST_SHOWN)
            table.add_row("CPUs used", f"{sum(cpus.values()):.2f}", shown)
        if bandwidths := now.by_label.get("memory_bandwidth_bytes_per_second/source"):
            share = now.mean("memory_roof_ratio")
            sources = " and ".join(bandwidths)
            given = f" of {now.mean('memory_bandwidth_bytes_per_second') / 1e9:.1f} GB/s, {sources}"
            table.add_row("roof of the memory", f"{100 * share:.0f} %", _bar(min(1.0, share), 20) + given)
        for rank, values in now.gpus.items():
            utilization = values.get("gpu_utilization_ratio")
            table.add_row(f"GPU {rank}", "-" if utilization is None else f"{100 * utilization:.0f} %", gpu_line(values))
        return table

    def _attainment(self, before: Reading, now: Reading) -> "Table":
        """How often each latency class had its first and next tokens in time."""
        table = _table()
        for name in now.by_label["slo_observations_total/latency_class"]:
            num, met = (
                now.by_label[label][name] - before.by_label.get(label, {}).get(name, 0.0)
                for label in ("slo_observations_total/latency_class", "slo_attained_total/latency_class")
            )
            share = met / num if num > 0 else 1.0
            table.add_row(f"class {name}", f"{100 * share:.1f} %" if num > 0 else "idle", _bar(share))
        return table

    def _latencies(self, before: Reading, now: Reading) -> "Table":
        from rich.table import Table

        table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
        table.add_column(f"last {max(0.0, now.at - before.at):.0f} s")
        for title in ("p50", "p95", "p99"):
            table.add_column(title, justify="right", min_width=9, style="bold")
        for title, name in _LATENCIES:
            if name in now.buckets:
                table.add_row(title, *(duration(quantile(before, now, name, q)) for q in (0.5, 0.95, 0.99)))
        return table

    def _counts(self, before: Reading, now: Reading) -> "Table":
        table = _table()
        for reason, count in now.by_label.get("request_success_total/finished_reason", {}).items():
            old = before.by_label.get("request_success_total/finished_reason", {}).get(reason, 0.0)
            recent = f"+{count - old:.0f}" if count > old else ""
            table.add_row(f"ended: {reason}", f"{count:.0f}", recent)
        table.add_row("preempted", f"{now.get('num_preemptions_total'):.0f}", "")
        return table


def _table() -> "Table":
    from rich.table import Table

    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(min_width=19)
    table.add_column(justify="right", min_width=9, style="bold")
    table.add_column(style="cyan")
    return table


def gpu_line(values: Mapping[str, float]) -> str:
    """What a GPU says of itself, as far as it does: 251 of 300 W, 64 °C, 3.0 GB of 8.0 GB, 1410 MHz."""

    def part(name: str, of: str, show: Callable[[float], str], unit: str = "") -> str:
        if name not in values:
            return ""
        most = f" of {show(values[of])}" if of in values else ""
        return f"{show(values[name])}{most}{unit}"

    errors = sum(values.get(f"gpu_{kind}_errors_total", 0.0) for kind in ("ecc_uncorrected", "xid"))
    parts = [
        part("gpu_power_watts", "gpu_power_limit_watts", lambda watts: f"{watts:.0f}", " W"),
        part("gpu_temperature_celsius", "", lambda degrees: f"{degrees:.0f} °C"),
        part("gpu_memory_used_bytes", "gpu_memory_total_bytes", lambda num: size(int(num))),
        part("gpu_sm_clock_hertz", "", lambda hertz: f"{hertz / 1e6:.0f} MHz"),
        "slowed" if values.get("gpu_is_slowed") else "",
        f"{errors:.0f} errors" if errors else "",
    ]
    return ", ".join(filter(None, parts))


def _bar(share: float, width: int = 40) -> str:
    filled = round(share * width)
    return "█" * filled + "░" * (width - filled)


def stage_bar(shares: Mapping[str, float], width: int = 40) -> str:
    """The states of a stage one after the other, each in its own character; `plan` fills what rounding leaves."""
    bar = "".join(_STATES[state] * round(shares.get(state, 0.0) * width) for state in _STATES if state != "plan")
    return bar[:width].ljust(width, _STATES["plan"]) if shares else ""


def curve(values: list[float]) -> str:
    """A line chart of block characters; the highest stands for the largest value."""
    most = max(values, default=0.0) or 1.0
    return "".join(_BLOCKS[round(value / most * (len(_BLOCKS) - 1))] for value in values)


def duration(seconds: float | None) -> str:
    """Such as 1.2 ms, 340 ms, 2.5 s; a dash for None."""
    if seconds is None:
        return "-"
    if seconds < 1:
        return f"{seconds * 1000:.1f} ms" if seconds < 0.1 else f"{seconds * 1000:.0f} ms"
    return f"{seconds:.1f} s"
