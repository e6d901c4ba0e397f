"""/metrics: Prometheus parses it, docs/metrics.md lists the names that vLLM lacks, and the dashboard queries only names
that exist."""

import json
import re
from pathlib import Path

import pytest
from harness import CONFIG
from metrics_page import MODEL, families, page

from pagewire.api.gateway.gateway import Gateway
from pagewire.api.gateway.metrics import GPU_METRICS, OLD_NAMES, Metrics
from pagewire.config.latency_classes import LatencyClass
from pagewire.ipc.epochs import NO_ENGINE
from pagewire.ipc.messages import Chunk, IdsPrompt, Limits, Pulse, Sampling, Snapshot, Submit, TextBatch, TextSpec
from pagewire.ipc.reports import SECONDS, Histogram
from pagewire.tools.reference import full_name

DOCS = Path(__file__).parents[3] / "docs"
VLLM_HAS = """
num_requests_running num_requests_waiting num_requests_waiting_by_reason kv_cache_usage_perc prompt_tokens_total
generation_tokens_total
time_to_first_token_seconds_bucket inter_token_latency_seconds_bucket e2e_request_latency_seconds_bucket
request_queue_time_seconds_sum request_prefill_time_seconds_sum request_decode_time_seconds_sum
request_inference_time_seconds_sum request_prompt_tokens_bucket request_generation_tokens_bucket
request_max_num_generation_tokens_bucket request_params_n_bucket request_params_max_tokens_bucket
request_success_total prefix_cache_queries_total prefix_cache_hits_total num_preemptions_total cache_config_info
iteration_tokens_total_bucket request_time_per_output_token_seconds_bucket external_prefix_cache_hits_total
spec_decode_num_drafts_total spec_decode_num_draft_tokens_total spec_decode_num_accepted_tokens_total
external_prefix_cache_queries_total prompt_tokens_cached_by_source_total engine_sleep_state lora_requests_info
estimated_read_bytes_per_gpu_total
"""  # names of samples


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


def test_a_reported_histogram_is_complete() -> None:
    lag = families(page())["pagewire:event_loop_lag_seconds"].samples
    mine = {(s.name.rpartition("_")[2], s.labels.get("le")): s.value for s in lag if s.labels["process"] == "core"}
    assert mine["bucket", "0.00025"] == 1 and mine["bucket", "0.0005"] == 2 and mine["bucket", "0.5"] == 3
    assert mine["bucket", "10.0"] == 3 and mine["bucket", "+Inf"] == mine["count", None] == 4
    assert mine["sum", None] == pytest.approx(99.5003)


def test_each_engine_has_series_of_its_own() -> None:
    gateway = Gateway(lambda message: None, lambda message: None)
    lag = Histogram(SECONDS).report()
    gateway.handle([Snapshot(0, running, 0, 0, 0, 0, 0, 0, 0, 0.0, engine=running - 3) for running in (3, 4)])
    gateway.handle([Pulse("core", lag, num, engine) for num, engine in ((5, 0), (6, 1))])
    gateway.handle([Pulse("api", lag, 7, NO_ENGINE)])
    found = families(Metrics(gateway, CONFIG).render().decode())
    running = found["pagewire:num_requests_running"].samples
    assert [(s.labels["engine"], s.value) for s in running] == [("0", 3), ("1", 4)]
    stale = {(s.labels.get("engine"), s.labels["process"]): s.value for s in found["pagewire:stale_frames"].samples}
    assert stale == {("0", "core"): 5, ("1", "core"): 6, (None, "api"): 7}
    (ended,) = {s.labels.get("engine") for s in found["pagewire:request_success"].samples}
    assert ended is None, "what the api counts is of all engines"
    assert all("engine" not in s.labels for family in families(page()).values() for s in family.samples)


def test_each_rank_has_its_memory_its_process_and_its_share_of_the_roof() -> None:
    found = families(page())

    def values(name: str, *labels: str) -> dict[tuple[str | None, ...], float]:
        return {tuple(s.labels.get(x) for x in labels): s.value for s in found[f"pagewire:{name}"].samples}

    memory = values("worker_memory_bytes", "rank", "kind")
    assert memory["0", "weights"] == memory["1", "weights"] == 900 << 20 and memory["0", "kv_cached"] == 5000
    assert values("process_cpu_seconds", "process") == {("worker",): 12.5, ("worker-1",): 12.5, ("core",): 2.5}
    assert values("process_threads", "process")["core",] == 3, "the api has not said what it takes"
    resident = values("process_resident_memory_bytes", "process", "kind")
    assert resident["worker", "shared"] == 900 << 20 and resident["core", "file"] == 6 and len(resident) == 9
    assert values("estimated_read_bytes_per_gpu", "rank") == {("0",): 6e9, ("1",): 5e9}
    assert values("memory_bandwidth_bytes_per_second", "rank", "source") == {("0", "measured"): 20e9}
    assert values("memory_roof_ratio", "rank") == {("0",): 0.75}, "the bandwidth of rank 1 is not known"
    assert values("gpu_utilization_ratio", "rank") == {("0",): 7.0}
    assert values("host_memory_available_bytes", "rank") == {("0",): 9, ("1",): 9}
    kinds = {name: found[f"pagewire:{name.removesuffix('_total')}"].type for name in GPU_METRICS}
    assert all((kind == "counter") == name.endswith("_total") for name, kind in kinds.items())
    nobody = families(Metrics(Gateway(lambda message: None), CONFIG).render().decode())
    assert not any(name.startswith(("pagewire:gpu_", "pagewire:worker_")) for name in nobody)


def test_the_document_names_the_metrics_that_vllm_lacks() -> None:
    own = (DOCS / "metrics.md").read_text().partition("which vLLM does not have")[2].partition("\n\n")[2]
    listed = re.findall(r"`(\w+)`", own.partition("\n\n")[0])
    found = {full_name(family).removeprefix("pagewire:") for family in families(page(num_engines=2)).values()}
    shared = {re.sub("_(bucket|sum)$", "", name) for name in VLLM_HAS.split()}
    assert len(listed) == len(set(listed)) and set(listed) == found - shared


@pytest.mark.parametrize("prefix", ["pagewire", "vllm"])
def test_the_dashboard_queries_existing_metrics(prefix: str) -> None:
    known = series(page(prefix))
    dashboard = json.loads((DOCS / "grafana.json").read_text().replace("${prefix}", prefix))
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", ())]
    queries += [variable["query"] for variable in dashboard["templating"]["list"] if variable["type"] == "query"]
    asked = {name for query in queries for name in re.findall(rf"\b{prefix}:\w+", query)}
    assert asked <= known and len(asked) > 30
    assert all(re.search(rf"\b{prefix}:\w+", query) for query in queries)
    for query in queries:
        assert query.count("(") == query.count(")") and query.count("{") == query.count("}"), query


# Metric → the panel that shows the same, or why it has none.
NO_PANEL = {
    "engine_ready": "only with several engines; /health and `pagewire top` show it",
    "engine_open_requests": "only with several engines",
    "engine_requests_total": "only with several engines",
    "model_state": "only with several models",
    "model_load_seconds": "only with several models",
    "cache_config_info": "it never changes",
    "engine_sleep_state": "an administrator knows, and /is_sleeping says it",
    "lora_requests_info": "it never changes",
    "kernel_fallbacks": "it is decided at start, and the log has a line for each",
    "slo_target_seconds": "it never changes",
    "prefix_cache_hits_total": "prompt tokens from the cache, by tier",
    "kv_tier_loaded_bytes_total": "in proportion to the prompt tokens from that tier",
    "request_inference_time_seconds": "prefill and decode in the mean time of each part",
    "spec_decode_num_drafts_total": "accepted draft tokens",
}


def test_every_metric_has_a_panel() -> None:
    dashboard = json.loads((DOCS / "grafana.json").read_text())
    panels = dashboard["panels"]
    asked = set(re.findall(r"\{prefix\}:(\w+)", " ".join(t["expr"] for p in panels for t in p.get("targets", ()))))
    found = {full_name(family).removeprefix("pagewire:") for family in families(page(num_engines=2)).values()}
    assert found - {re.sub("_(bucket|sum|count)$", "", name) for name in asked} == NO_PANEL.keys()
    places = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in panels]
    assert len({*places}) == len({panel["id"] for panel in panels}) == len(panels), "panels on top of each other"


def test_the_names_of_vllm_are_served() -> None:
    assert {f"vllm:{name}" for name in VLLM_HAS.split()} <= series(page("vllm"))


def test_old_names_stand_beside_new_ones_under_vllms_prefix_only() -> None:
    new, old = families(page("vllm")), {name.removesuffix("_total"): old for name, old in OLD_NAMES.items()}
    for name, alias in old.items():
        was = new[f"vllm:{alias.removesuffix('_total')}"]
        assert f"pagewire:{was.name.removeprefix('vllm:')}" not in families(page())
        if name == "prefix_cache_hit_rate":
            ((sample,), (hits,), (asked,)) = (
                new[f"vllm:{kind}"].samples
                for kind in ("gpu_prefix_cache_hit_rate", "prefix_cache_hits", "prefix_cache_queries")
            )
            assert sample.value == hits.value / asked.value > 0 and f"vllm:{name}" not in new
            continue
        now = new[f"vllm:{name}"]
        assert was.type == now.type
        assert [(s.labels, s.value) for s in was.samples] == [(s.labels, s.value) for s in now.samples]
    rows = re.findall(r"^\| `(\w+)` \| `([a-z_]+)` \|$", (DOCS / "metrics.md").read_text(), re.MULTILINE)
    assert dict(rows) == {old: name for name, old in OLD_NAMES.items()}


# What they read, as their source names it: production-stack of 2026-08-05 (`stats/engine_stats.py`), aibrix of
# 2026-08-23 (`pkg/metrics/metrics.go`), the Gateway API inference extension of 2026-08-18 (model server protocol).
READ_BY = {
    "production-stack": """num_requests_running num_requests_waiting gpu_prefix_cache_hit_rate
        gpu_prefix_cache_hits_total gpu_prefix_cache_queries_total gpu_cache_usage_perc""",
    "aibrix": """num_requests_running num_requests_waiting engine_sleep_state gpu_cache_usage_perc
        time_per_output_token_seconds_bucket time_per_output_token_seconds_sum time_to_first_token_seconds_bucket
        e2e_request_latency_seconds_bucket kv_cache_usage_perc prefix_cache_hits_total lora_requests_info""",
    "gateway": "num_requests_waiting num_requests_running kv_cache_usage_perc cache_config_info lora_requests_info",
}


def test_what_the_systems_around_an_engine_read_is_there() -> None:
    found = families(page("vllm"))
    for reader, names in READ_BY.items():
        assert {f"vllm:{name}" for name in names.split()} <= series(page("vllm")), reader
    (facts,) = found["vllm:cache_config_info"].samples
    assert facts.labels["block_size"] == str(CONFIG.block_size) and facts.labels["num_gpu_blocks"] == "100"
    (lora,) = found["vllm:lora_requests_info"].samples
    assert lora.labels == {
        "model_name": MODEL, "max_lora": "1", "running_lora_adapters": MODEL, "waiting_lora_adapters": ""
    }  # fmt: skip
    assert lora.value > 1.7e9
    states = {s.labels["sleep_state"]: s.value for s in found["vllm:engine_sleep_state"].samples}
    assert states == {"awake": 1, "weights_offloaded": 0, "discard_all": 0}


def test_a_model_without_an_adapter_that_sleeps() -> None:
    gateway = Gateway(lambda message: None)
    gateway.handle([Snapshot(0, 0, 5, 0, 0, 0, 0, 0, 0, 0.0, is_asleep=True)])
    found = families(Metrics(gateway, CONFIG).render().decode())
    assert "pagewire:lora_requests_info" not in found
    states = {s.labels["sleep_state"]: s.value for s in found["pagewire:engine_sleep_state"].samples}
    assert states == {"awake": 0, "weights_offloaded": 1, "discard_all": 0}
    waiting = {s.labels["reason"]: s.value for s in found["pagewire:num_requests_waiting_by_reason"].samples}
    assert waiting == {"capacity": 0, "deferred": 5}


def test_the_attainment_of_each_class_with_targets_is_counted() -> None:
    now, posted = 1.0, list[object]()
    classes = {"chat": LatencyClass(ttft_ms=500, itl_ms=50), "batch": LatencyClass(), "report": LatencyClass(ttft_ms=1)}
    gateway = Gateway(posted.append, latency_classes=classes, clock=lambda: now)
    for name in ("chat", "chat", "batch", "report", ""):
        gateway.submit([Submit(0, 1, IdsPrompt(b""), Sampling(), Limits(), TextSpec(), latency_class=name)])
    rids = [submit.rid for submit in posted if isinstance(submit, Submit)]
    for at, chosen in ((1.4, rids[:1]), (1.44, rids[:1]), (1.6, rids)):
        now = at
        gateway.handle([TextBatch(tuple(Chunk(rid, "a", bytes(4)) for rid in chosen))])
    found = families(Metrics(gateway, CONFIG).render().decode())

    def values(name: str) -> dict[tuple[str, str], float]:
        samples = found[f"pagewire:{name}"].samples
        return {(s.labels["latency_class"], s.labels["target"]): s.value for s in samples}

    assert values("slo_target_seconds") == {("chat", "ttft"): 0.5, ("chat", "itl"): 0.05, ("report", "ttft"): 0.001}
    assert values("slo_observations") == {("chat", "ttft"): 2, ("chat", "itl"): 2, ("report", "ttft"): 1}
    assert values("slo_attained") == {("chat", "ttft"): 1, ("chat", "itl"): 1, ("report", "ttft"): 0}
    without = Metrics(Gateway(posted.append), CONFIG).render().decode()
    assert not any(name.startswith("pagewire:slo") for name in families(without))
