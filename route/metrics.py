"""The router's /metrics in Prometheus' text format."""

from collections.abc import Iterable, Mapping

from ..api.gateway.stats import Stats
from .engines import Fleet
from .relay import RelayStats


def render(fleet: Fleet, relay: RelayStats, edge: Stats, *, num_open: int) -> bytes:
    """The whole page. `num_open`: open requests."""
    engines = fleet.engines
    families: list[tuple[str, str, str, Iterable[tuple[str, float]]]] = [
        ("gauge", "open_requests", "Open requests.", [("", num_open)]),
        (
            "gauge",
            "engine_ready",
            "Whether an engine gets new requests.",
            [(_label("engine", e.url), int(e.is_able)) for e in engines],
        ),
        (
            "gauge",
            "engine_open_requests",
            "Open requests of this router at an engine.",
            [(_label("engine", e.url), e.num_open) for e in engines],
        ),
        (
            "counter",
            "engine_requests_total",
            "Requests sent to an engine.",
            [(_label("engine", e.url), e.num_sent) for e in engines],
        ),
        (
            "counter",
            "engine_ejections_total",
            "Times an engine stopped getting new requests.",
            [(_label("engine", e.url), e.num_ejections) for e in engines],
        ),
        (
            "counter",
            "requests_total",
            "Requests answered by engines, by status.",
            [(_label("status", status), n) for status, n in sorted(relay.requests.items())],
        ),
        (
            "counter",
            "refused_total",
            "Requests refused by the router, by error code.",
            [(_label("reason", reason), n) for reason, n in sorted(edge.refused.items())],
        ),
        ("counter", "retries_total", "Requests sent again before the first byte of an answer.", [("", relay.retries)]),
        ("counter", "resumes_total", "Streams continued by another engine.", [("", relay.resumes)]),
        ("counter", "resumed_tokens_total", "Tokens of those streams until then.", [("", relay.resumed_tokens)]),
        (
            "counter",
            "prefill_legs_total",
            "Prompts that an engine was to compute for another.",
            [("", relay.prefill_legs)],
        ),
        (
            "counter",
            "prefill_legs_failed_total",
            "Of these, prompts that it did not compute.",
            [("", relay.prefill_failures)],
        ),
        (
            "counter",
            "failures_total",
            "Requests that failed, by cause.",
            [(_label("reason", reason), n) for reason, n in relay.failures.items()],
        ),
        (
            "counter",
            "prefix_blocks_total",
            "Prefix blocks of prompts.",
            [("", fleet.choice.num_blocks_asked)],
        ),
        (
            "counter",
            "prefix_blocks_met_total",
            "Prefix blocks of prompts that the chosen engine had been sent before.",
            [("", fleet.choice.num_blocks_met)],
        ),
    ]
    lines: list[str] = []
    for kind, name, text, samples in families:
        full = f"pagewire_router_{name}"
        lines += [f"# HELP {full} {text}", f"# TYPE {full} {kind}"]
        lines += [f"{full}{labels} {value}" for labels, value in samples]
    return "\n".join([*lines, ""]).encode()


def merge_pages(pages: Mapping[str, str]) -> bytes:
    """The /metrics pages of several engines as one, with a label `engine`. `pages`: by the engine's address."""
    heads: dict[str, list[str]] = {}
    samples: dict[str, list[str]] = {}
    for url, page in pages.items():
        label, family = _label("engine", url)[1:-1], ""
        for line in page.splitlines():
            if line.startswith("# "):
                family = line.split(" ", 3)[2]
                if line not in heads.setdefault(family, []):
                    heads[family].append(line)
            elif line:
                name, brace, rest = line.partition("{")
                samples.setdefault(family, []).append(f"{name}{{{label},{rest}" if brace else line)
    return "".join(f"{line}\n" for family in heads for line in heads[family] + samples.get(family, [])).encode()


def _label(name: str, value: str) -> str:
    escaped = value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'{{{name}="{escaped}"}}'
