"""/metrics: the gateway's counts and the core's last snapshot in Prometheus' text format.

Names follow vLLM's with the prefix `pagewire:`, so its dashboards need one replacement.
"""

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.registry import Collector

from ..ipc.messages import Snapshot
from .gateway import Gateway
from .stats import Histogram

CONTENT_TYPE: str = CONTENT_TYPE_LATEST


class Metrics:
    """Renders /metrics for one gateway."""

    def __init__(self, gateway: Gateway, model_name: str) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_GatewayCollector(gateway, model_name))

    def render(self) -> bytes:
        """The whole page."""
        text: bytes = generate_latest(self._registry)
        return text


class _GatewayCollector(Collector):
    def __init__(self, gateway: Gateway, model_name: str) -> None:
        self._gateway = gateway
        self._model = model_name

    def collect(self) -> Iterator[Metric]:
        core = self._gateway.snapshot or Snapshot(0, 0, 0, 0, 0, 0, 0, 0, 0, 0.0)
        yield from self._of_the_core(core)
        yield from self._of_the_tiers(core)
        stats = self._gateway.stats
        finished = CounterMetricFamily(
            "pagewire:request_success", "Sequences that ended, by reason.", labels=["model_name", "finished_reason"]
        )
        for reason, count in stats.finished.items():
            finished.add_metric([self._model, reason], count)
        yield finished
        yield self._histogram(
            "time_to_first_token_seconds", "From a request's arrival to its first token.", stats.time_to_first_token_s
        )
        yield self._histogram(
            "inter_token_latency_seconds", "Between the tokens of a sequence.", stats.inter_token_latency_s
        )
        yield self._histogram(
            "e2e_request_latency_seconds", "From a request's arrival to its end.", stats.request_latency_s
        )

    def _of_the_core(self, core: Snapshot) -> Iterator[Metric]:
        gauges = (
            ("num_requests_running", "Sequences that run.", core.num_running),
            ("num_requests_waiting", "Sequences that wait.", core.num_waiting),
            (
                "kv_cache_usage_perc",
                "Share of the KV cache in use; 1 is all.",
                core.num_blocks_used / (core.num_blocks or 1),
            ),
            ("engine_step_age_seconds", "How long the oldest step in flight has been out.", core.step_age_s),
        )
        for name, text, value in gauges:
            gauge = GaugeMetricFamily(f"pagewire:{name}", text, labels=["model_name"])
            gauge.add_metric([self._model], value)
            yield gauge
        counters = (
            ("prompt_tokens", "Prompt tokens of scheduled sequences.", core.num_prompt_tokens),
            ("generation_tokens", "Tokens generated.", core.num_output_tokens),
            ("prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", core.num_prompt_tokens),
            ("prefix_cache_hits", "Prompt tokens found in the prefix cache.", core.num_cached_tokens),
            ("num_preemptions", "Sequences that gave their blocks back for a while.", core.num_preemptions),
            ("spec_decode_num_drafts", "How often a sequence's next tokens were guessed.", core.num_drafts),
            ("spec_decode_num_draft_tokens", "Tokens that were guessed.", core.num_draft_tokens),
            ("spec_decode_num_accepted_tokens", "Guessed tokens that came true.", core.num_accepted_tokens),
        )
        for name, text, value in counters:
            counter = CounterMetricFamily(f"pagewire:{name}", text, labels=["model_name"])
            counter.add_metric([self._model], value)
            yield counter

    def _of_the_tiers(self, core: Snapshot) -> Iterator[Metric]:
        """Nothing without a KV connector. What a tier serves again after a preemption counts among its hits."""
        if not core.tiers:
            return
        missed = max(0, core.num_prompt_tokens - core.num_cached_tokens)
        queries = CounterMetricFamily(
            "pagewire:external_prefix_cache_queries",
            "Prompt tokens that the device's prefix cache did not have and the KV tiers were asked for.",
            labels=["model_name"],
        )
        queries.add_metric([self._model], missed)
        yield queries
        labels = ["model_name", "tier"]
        families = (
            (GaugeMetricFamily, "kv_tier_blocks", "KV blocks that the tier holds."),
            (GaugeMetricFamily, "kv_tier_capacity_blocks", "KV blocks that the tier can hold; 0: no bound of its own."),
            (CounterMetricFamily, "external_prefix_cache_hits", "Tokens whose KV was loaded from the tier."),
            (CounterMetricFamily, "kv_tier_stored_blocks", "KV blocks written to the tier."),
            (CounterMetricFamily, "kv_tier_evicted_blocks", "KV blocks that the tier dropped for others."),
            (CounterMetricFamily, "kv_tier_failed_blocks", "KV blocks that could not be loaded from the tier."),
        )
        values = [
            (t.num_blocks, t.capacity, t.num_hit_tokens, t.num_stored, t.num_evicted, t.num_failed) for t in core.tiers
        ]
        for column, (kind, name, text) in enumerate(families):
            family = kind(f"pagewire:{name}", text, labels=labels)
            for tier, row in zip(core.tiers, values, strict=True):
                family.add_metric([self._model, tier.name], row[column])
            yield family

    def _histogram(self, name: str, text: str, histogram: Histogram) -> Metric:
        family = HistogramMetricFamily(f"pagewire:{name}", text, labels=["model_name"])
        buckets: list[tuple[str, float]] = []
        running = 0
        for bound, count in zip((*histogram.bounds, float("inf")), histogram.counts, strict=True):
            running += count
            buckets.append((str(bound) if bound != float("inf") else "+Inf", running))
        family.add_metric([self._model], buckets, sum_value=histogram.total)
        return family
