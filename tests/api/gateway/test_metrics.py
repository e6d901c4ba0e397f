"""/metrics: text that Prometheus reads, the names of docs/metrics.md, and a dashboard that asks for no others."""

import json
import re
from pathlib import Path

import pytest
from harness import CONFIG
from msgspec.structs import replace
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from pagewire.api.gateway.gateway import Gateway
from pagewire.api.gateway.metrics import Metrics
from pagewire.ipc.messages import Pulse, Snapshot, TierSnapshot
from pagewire.ipc.reports import SECONDS, Histogram

DOCS = Path(__file__).parents[3] / "docs"
MODEL = 'my "model"\\1'


def page(prefix: str = "pagewire") -> str:
    """What a server with everything says."""
    gateway = Gateway(lambda message: None)
    lag = Histogram(SECONDS)
    for value in (0.0, 0.0003, 0.5, 99.0):
        lag.observe(value)
    tier = TierSnapshot("host", 10, 64, 320, 40, 30, 0)
    core = Snapshot(9, 3, 2, 100, 25, 1, 700, 30, 44, 0.5, (tier,), histograms={"step_time_seconds": lag.report()})
    gateway.handle([core, Pulse("api", lag.report()), Pulse("core", lag.report())])
    config = replace(CONFIG, served_model_names=(MODEL,), metrics_prefix=prefix)
    return Metrics(gateway, config).render().decode()


def families(text: str) -> dict[str, Metric]:
    return {family.name: family for family in text_string_to_metric_families(text)}


def series(text: str) -> set[str]:
    """Names of all samples."""
    return {sample.name for family in families(text).values() for sample in family.samples}


def test_prometheus_understands_every_line() -> None:
    text = page()
    found = families(text)
    assert text.endswith("\n") and len(set(text.splitlines())) == len(text.splitlines())
    samples = [sample for family in found.values() for sample in family.samples]
    assert len(samples) == sum(not line.startswith("#") for line in text.splitlines())
    for family in found.values():
        assert family.type in ("gauge", "counter", "histogram") and family.documentation.endswith("."), family
        for sample in family.samples:
            assert sample.labels["model_name"] == MODEL
    assert len(found) == text.count("# TYPE") == text.count("# HELP")


def test_buckets_grow_to_the_count() -> None:
    for family in families(page()).values():
        if family.type != "histogram":
            continue
        for process in {sample.labels.get("process") for sample in family.samples}:
            mine = [sample for sample in family.samples if sample.labels.get("process") == process]
            buckets = [(float(s.labels["le"]), s.value) for s in mine if s.name.endswith("_bucket")]
            assert buckets == sorted(buckets) and [value for _, value in buckets] == sorted(v for _, v in buckets)
            (count,) = (sample.value for sample in mine if sample.name == f"{family.name}_count")
            assert buckets[-1] == (float("inf"), count)


def test_a_report_arrives_whole() -> None:
    lag = families(page())["pagewire:event_loop_lag_seconds"].samples
    mine = {(s.name.rpartition("_")[2], s.labels.get("le")): s.value for s in lag if s.labels["process"] == "core"}
    assert mine["bucket", "0.00025"] == 1 and mine["bucket", "0.0005"] == 2 and mine["bucket", "0.5"] == 3
    assert mine["bucket", "10.0"] == 3 and mine["bucket", "+Inf"] == mine["count", None] == 4
    assert mine["sum", None] == pytest.approx(99.5003)


def test_the_document_lists_what_is_there() -> None:
    rows = [line.split("|")[1:4] for line in (DOCS / "metrics.md").read_text().splitlines() if line.startswith("| `")]
    listed = {name.strip(" `*"): (kind.strip(), set(re.findall(r"`(\w+)`", labels))) for name, kind, labels in rows}
    found = {}
    for family in families(page()).values():
        name = family.name.removeprefix("pagewire:") + ("_total" if family.type == "counter" else "")
        found[name] = (family.type, set(family.samples[0].labels) - {"model_name", "le"})
    assert listed == found


@pytest.mark.parametrize("prefix", ["pagewire", "vllm"])
def test_the_dashboard_asks_for_what_is_there(prefix: str) -> None:
    known = series(page(prefix))
    dashboard = json.loads((DOCS / "grafana.json").read_text().replace("${prefix}", prefix))
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", ())]
    queries += [variable["query"] for variable in dashboard["templating"]["list"] if variable["type"] == "query"]
    asked = {name for query in queries for name in re.findall(rf"\b{prefix}:\w+", query)}
    assert asked <= known and len(asked) > 30
    assert all(re.search(rf"\b{prefix}:\w+", query) for query in queries)
    for query in queries:
        assert query.count("(") == query.count(")") and query.count("{") == query.count("}"), query


def test_the_names_that_vllms_users_know() -> None:
    names = """num_requests_running num_requests_waiting kv_cache_usage_perc prompt_tokens_total generation_tokens_total
    time_to_first_token_seconds_bucket inter_token_latency_seconds_bucket e2e_request_latency_seconds_bucket
    request_queue_time_seconds_sum request_prefill_time_seconds_sum request_decode_time_seconds_sum
    request_inference_time_seconds_sum request_prompt_tokens_bucket request_generation_tokens_bucket
    request_max_num_generation_tokens_bucket request_params_n_bucket request_params_max_tokens_bucket
    request_success_total prefix_cache_queries_total prefix_cache_hits_total num_preemptions_total cache_config_info
    iteration_tokens_total_bucket request_time_per_output_token_seconds_bucket external_prefix_cache_hits_total"""
    assert {f"vllm:{name}" for name in names.split()} <= series(page("vllm"))
