"""`LLM.get_metrics`: the counters of an engine in this process, with vLLM's names and classes."""

from dataclasses import dataclass

from ..engine.core.scheduler import Scheduler


@dataclass(frozen=True)
class Metric:
    """One number of an engine."""

    name: str
    labels: dict[str, str]


@dataclass(frozen=True)
class Counter(Metric):
    """A number that only grows."""

    value: int


@dataclass(frozen=True)
class Gauge(Metric):
    """A number that goes up and down."""

    value: float


def metrics_of(scheduler: Scheduler, model_name: str) -> list[Metric]:
    """The metrics that `/metrics` of a server takes from its core. A server's page has more."""
    labels = {"model_name": model_name, "engine": "0"}
    counters = scheduler.counters
    gauges = {
        "num_requests_running": scheduler.num_running,
        "num_requests_waiting": scheduler.num_waiting,
        "kv_cache_usage_perc": scheduler.pool.num_held / max(1, scheduler.pool.num_pages),
    }
    totals = {
        "num_preemptions": counters.num_preemptions,
        "prompt_tokens": counters.num_prompt_tokens,
        "generation_tokens": counters.num_output_tokens,
        "prefix_cache_queries": counters.num_prompt_tokens,
        "prefix_cache_hits": counters.num_cached_tokens,
        "spec_decode_num_drafts": counters.num_drafts,
        "spec_decode_num_draft_tokens": counters.num_draft_tokens,
        "spec_decode_num_accepted_tokens": counters.num_accepted_tokens,
    }
    return [
        *(Gauge(f"vllm:{name}", labels, float(value)) for name, value in gauges.items()),
        *(Counter(f"vllm:{name}", labels, value) for name, value in totals.items()),
    ]
