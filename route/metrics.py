"""/metrics of a router, in Prometheus' text format."""

from collections.abc import Iterable, Mapping

from ..api.gateway.stats import Stats
from .engines import Fleet
from .relay import RelayStats


def render(fleet: Fleet, relay: RelayStats, edge: Stats, *, num_open: int) -> bytes:
    """The whole page. `num_open`: requests."""
    engines = fleet.engines
    families: list[tuple[str, str, str, Iterable[tuple[str, float]]]] = [
        ("gauge", "open_requests", "Requests that are open.", [("", num_open)]),
        (
            "gauge",
            "engine_ready",
            "Whether an engine gets new requests.",
            [(_label("engine", e.url), int(e.is_able)) for e in engines],
        ),
        (
            "gauge",
            "engine_open_requests",
            "Requests that an engine has from here.",
            [(_label("engine", e.url), e.num_open) for e in engines],
        ),
        (
            "counter",
            "engine_requests_total",
            "Requests that an engine was sent.",
            [(_label("engine", e.url), e.num_sent) for e in engines],
        ),
        (
            "counter",
            "engine_ejections_total",
            "How often an engine stopped getting requests.",
            [(_label("engine", e.url), e.num_ejections) for e in engines],
        ),
        (
            "counter",
            "requests_total",
            "Requests that engines answered, by status.",
            [(_label("status", status), n) for status, n in sorted(relay.requests.items())],
        ),
        (
            "counter",
            "refused_total",
            "Requests that got an error from the router, by its code.",
            [(_label("reason", reason), n) for reason, n in sorted(edge.refused.items())],
        ),
        ("counter", "retries_total", "Requests sent again before their client had a byte.", [("", relay.retries)]),
        ("counter", "resumes_total", "Streams that another engine went on with.", [("", relay.resumes)]),
        ("counter", "resumed_tokens_total", "Tokens that those streams had by then.", [("", relay.resumed_tokens)]),
        (
            "counter",
            "failures_total",
            "Requests that were given up, by cause.",
            [(_label("reason", reason), n) for reason, n in relay.failures.items()],
        ),
        (
            "counter",
            "prefix_blocks_total",
            "Blocks of prompts.",
            [("", fleet.num_prefix_blocks["asked"])],
        ),
        (
            "counter",
            "prefix_blocks_met_total",
            "Those that the chosen engine had seen.",
            [("", fleet.num_prefix_blocks["met"])],
        ),
    ]
    lines: list[str] = []
    for kind, name, text, samples in families:
        full = f"pagewire_router_{name}"
        lines += [f"# HELP {full} {text}", f"# TYPE {full} {kind}"]
        lines += [f"{full}{labels} {value}" for labels, value in samples]
    return "\n".join([*lines, ""]).encode()


def together(pages: Mapping[str, str]) -> bytes:
    """The pages of several engines as one, in which each sample says whose it is. `pages`: by the engine's address."""
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
