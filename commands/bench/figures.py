"""The figures of a measured load, with vLLM's names: a table and a JSON object."""

import math
import statistics
from collections.abc import Mapping, Sequence

from ...errors import ConfigError
from .load import Outcome

METRICS = {  # name → title, and the seconds of an outcome
    "ttft": "Time to First Token",
    "tpot": "Time per Output Token (excl. 1st token)",
    "itl": "Inter-token Latency",
    "e2el": "End-to-end Latency",
}


def percentile(values: Sequence[float], percent: float) -> float:
    """With linear interpolation between neighbours, as numpy's; 0 of no values."""
    if not values:
        return 0.0
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    below = math.floor(place)
    return ordered[below] + (ordered[min(below + 1, len(ordered) - 1)] - ordered[below]) * (place - below)


def seconds_of(outcomes: Sequence[Outcome], metric: str) -> list[float]:
    """The values of one metric, of the requests that succeeded."""
    good = [outcome for outcome in outcomes if not outcome.error]
    match metric:
        case "ttft":
            return [outcome.ttft for outcome in good]
        case "tpot":
            return [outcome.tpot for outcome in good if outcome.num_output > 1]
        case "itl":
            return [gap for outcome in good for gap in outcome.itl]
        case _:
            return [outcome.latency for outcome in good]


def parse_goodput(texts: Sequence[str]) -> dict[str, float]:
    """`ttft:100` → the most milliseconds of each metric that a good request has. Raises ConfigError."""
    found = {}
    for text in texts:
        name, _, limit = text.partition(":")
        try:
            found[name] = float(limit)
        except ValueError as error:
            raise ConfigError(f"--goodput {text}: write ttft:100, tpot:30 or e2el:2000, in milliseconds.") from error
        if name not in ("ttft", "tpot", "e2el"):
            raise ConfigError(f"--goodput {text}: write ttft:100, tpot:30 or e2el:2000, in milliseconds.")
    return found


def measure(
    outcomes: Sequence[Outcome], duration: float, *, percents: Sequence[float], goodput: Mapping[str, float]
) -> dict[str, object]:
    """All figures by the names of vLLM's JSON. `duration`: seconds from the first request to the last answer."""
    good = [outcome for outcome in outcomes if not outcome.error]
    num_prompt, num_output = sum(one.num_prompt for one in good), sum(one.num_output for one in good)
    found: dict[str, object] = {
        "duration": duration,
        "completed": len(good),
        "failed": len(outcomes) - len(good),
        "total_input_tokens": num_prompt,
        "total_output_tokens": num_output,
        "request_throughput": len(good) / duration,
        "request_goodput": None,
        "output_throughput": num_output / duration,
        "total_token_throughput": (num_prompt + num_output) / duration,
        "max_output_tokens_per_s": max(_per_second(good), default=0.0),
        "max_concurrent_requests": _most_at_once(good),
    }
    if goodput:
        times = {"ttft": lambda one: one.ttft, "tpot": lambda one: one.tpot, "e2el": lambda one: one.latency}
        kept = [one for one in good if all(times[name](one) * 1e3 <= limit for name, limit in goodput.items())]
        found["request_goodput"] = len(kept) / duration
    for name in METRICS:
        values = [second * 1e3 for second in seconds_of(outcomes, name)]
        found[f"mean_{name}_ms"] = statistics.fmean(values) if values else 0.0
        found[f"median_{name}_ms"] = statistics.median(values) if values else 0.0
        found[f"std_{name}_ms"] = statistics.pstdev(values) if values else 0.0
        found |= {f"p{percent:g}_{name}_ms": percentile(values, percent) for percent in percents}
    return found


def _per_second(outcomes: Sequence[Outcome]) -> list[float]:
    """Pieces of text that arrived in each second."""
    if not outcomes:
        return []
    first = min(one.start for one in outcomes)
    counts: dict[int, float] = {}
    for one in outcomes:
        moment = one.start + one.ttft
        share = one.num_output / (len(one.itl) + 1)  # tokens of a piece
        for gap in (0.0, *one.itl):
            moment += gap
            counts[int(moment - first)] = counts.get(int(moment - first), 0.0) + share
    return [*counts.values()]


def _most_at_once(outcomes: Sequence[Outcome]) -> int:
    changes = sorted([(one.start, 1) for one in outcomes] + [(one.start + one.latency, -1) for one in outcomes])
    most = now = 0
    for _, change in changes:
        now += change
        most = max(most, now)
    return most


def table(figures: Mapping[str, object], metrics: Sequence[str], percents: Sequence[float]) -> str:
    """The figures as vLLM prints them."""
    rows = [
        ("Successful requests", "completed"),
        ("Failed requests", "failed"),
        ("Maximum request concurrency", "max_concurrency"),
        ("Request rate configured (RPS)", "request_rate"),
        ("Benchmark duration (s)", "duration"),
        ("Total input tokens", "total_input_tokens"),
        ("Total generated tokens", "total_output_tokens"),
        ("Request throughput (req/s)", "request_throughput"),
        ("Request goodput (req/s)", "request_goodput"),
        ("Output token throughput (tok/s)", "output_throughput"),
        ("Peak output token throughput (tok/s)", "max_output_tokens_per_s"),
        ("Peak concurrent requests", "max_concurrent_requests"),
        ("Total token throughput (tok/s)", "total_token_throughput"),
    ]
    lines = [" Serving Benchmark Result ".center(50, "=")]
    lines += [_line(label, figures[key]) for label, key in rows if figures.get(key) not in (None, "inf")]
    for name in metrics:
        short = name.upper()
        lines.append(METRICS[name].center(50, "-"))
        lines += [_line(f"{word.title()} {short} (ms)", figures[f"{word}_{name}_ms"]) for word in ("mean", "median")]
        lines += [_line(f"P{percent:g} {short} (ms)", figures[f"p{percent:g}_{name}_ms"]) for percent in percents]
    return "\n".join([*lines, "=" * 50])


def _line(label: str, value: object) -> str:
    shown = f"{value:.2f}" if isinstance(value, float) else str(value)
    return f"{label + ':':<40} {shown:<10}".rstrip()
