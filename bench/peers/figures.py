"""Computes the table's figures from streams."""

from collections.abc import Sequence
from itertools import pairwise

from ..report import percentile
from .base import Stream


def figures(streams: Sequence[Stream], *, cpu_s: float, peak_bytes: int, ready_s: float) -> dict[str, float]:
    """The table's columns for one run of one workload.

    TTFT: from sending a request to its first token. ITL: times between consecutive arrivals in a stream, over all
    streams. ms/token: a stream's time after its first token divided by its tokens after the first; median of the
    streams. out tok/s: all tokens divided by the time from sending the first request to the last token.
    """
    num_tokens = sum(stream.num_tokens for stream in streams)
    seconds = max(stream.times[-1] for stream in streams) - min(stream.sent for stream in streams)
    first = [stream.times[0] - stream.sent for stream in streams]
    gaps = [b - a for stream in streams for a, b in pairwise(stream.times)]
    paces = [(s.times[-1] - s.times[0]) / (s.num_tokens - 1) for s in streams if s.num_tokens > 1]
    found = {"out tok/s": num_tokens / seconds}
    if paces:
        found["ms/token"] = percentile(paces, 50) * 1e3
    for label, values in (("TTFT", first), ("ITL", gaps)):
        if values:
            found |= {f"{label} p{p} ms": percentile(values, p) * 1e3 for p in (50, 99)}
    return found | {"CPU-s/1k tok": cpu_s / num_tokens * 1e3, "peak GB": peak_bytes / 1e9, "ready s": ready_s}
