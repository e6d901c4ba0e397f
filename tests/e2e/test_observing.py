"""What an operator sees of a real server: metrics, request logs and spans, and timings in the answer."""

import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from collector import Collector, attributes
from prometheus_client.parser import text_string_to_metric_families
from waiting import until

from pagewire.tools.servers import Server

pytestmark = pytest.mark.e2e

PARTS = ("tokenizer_queue_ms", "tokenize_ms", "queue_ms", "prefill_ms", "decode_ms")
CHAT = {"messages": [{"role": "user", "content": "Count from 1 to 9"}], "temperature": 0}
TRACE, CALLER = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


@pytest.fixture
def collector() -> Iterator[Collector]:
    collector = Collector()
    yield collector
    collector.close()


def samples(server: Server) -> dict[str, float]:
    """The values in /metrics by name; some labels are part of the name."""
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(server.get("/metrics")):
        for sample in family.samples:
            name = sample.name.partition(":")[2] + "".join(
                f"[{sample.labels[label]}]"
                for label in ("finished_reason", "reason", "process", "source", "kind", "le")
                if label in sample.labels
            )
            found[name] = sample.value
    return found


def test_the_phases_of_a_request_are_in_the_metrics_and_the_answer(start: Callable[..., Server]) -> None:
    """The api process takes the time of a token when it receives it. It would have to miss hundreds of steps to receive
    the first token and the last at once."""
    server = start().wait_ready()  # not shared: the engine reports requests late, even those of an earlier test
    before = samples(server)
    body = {**CHAT, "max_tokens": 400, "ignore_eos": True, "return_timings": True}
    answer = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=60).json()
    usage, timings = answer["usage"], answer["timings"]
    assert set(timings) == {*PARTS, "total_ms"}
    assert sum(timings[part] for part in PARTS) == pytest.approx(timings["total_ms"], abs=0.01)
    assert timings["prefill_ms"] > 0 and timings["decode_ms"] > 0
    until(
        lambda: (
            samples(server)["generation_tokens_total"] >= before["generation_tokens_total"] + usage["completion_tokens"]
        ),
        "the engine reports the tokens",
        60,
    )
    after = samples(server)

    def grown(name: str) -> float:
        return after[name] - before.get(name, 0.0)

    assert grown("prompt_tokens_total") == usage["prompt_tokens"]
    assert grown("request_success_total[length]") == 1 and usage["completion_tokens"] == 400
    assert grown("request_params_n_count") == 1 and grown("request_params_n_sum") == 1
    assert grown("request_prompt_tokens_sum") == usage["prompt_tokens"]
    assert grown("request_generation_tokens_sum") == usage["completion_tokens"]
    assert grown("request_max_num_generation_tokens_sum") == usage["completion_tokens"]
    for part in ("tokenizer_queue", "tokenize", "queue", "prefill", "decode"):
        assert grown(f"request_{part}_time_seconds_count") == 1
        assert grown(f"request_{part}_time_seconds_sum") * 1000 == pytest.approx(timings[f"{part}_ms"], abs=0.01)
    assert grown("request_inference_time_seconds_count") == grown("request_time_per_output_token_seconds_count") == 1
    assert grown("e2e_request_latency_seconds_sum") * 1000 == pytest.approx(timings["total_ms"], abs=0.01)
    assert grown("time_to_first_token_seconds_count") == 1
    first_token_ms = 1000 * grown("time_to_first_token_seconds_sum")
    assert first_token_ms + timings["decode_ms"] == pytest.approx(timings["total_ms"], abs=0.01)
    assert 1000 * grown("inter_token_latency_seconds_sum") == pytest.approx(timings["decode_ms"], abs=0.01)
    assert grown("inter_token_latency_seconds_count") == usage["completion_tokens"] - 1
    steps = grown("step_time_seconds_count")
    assert steps >= usage["completion_tokens"]
    assert grown("step_wait_time_seconds_count") == steps and grown("step_host_time_seconds_count") > 0
    assert 0 < 1000 * grown("step_time_seconds_sum") < timings["total_ms"]
    assert grown("step_decode_rows_sum") + grown("step_prompt_tokens_sum") == grown("iteration_tokens_total_sum")
    assert usage["prompt_tokens"] <= grown("step_prompt_tokens_sum") + grown("prefix_cache_hits_total")
    assert grown("step_decode_rows_sum") >= usage["completion_tokens"] - 1
    assert after["prompt_tokens_cached_by_source_total[device]"] == after["prefix_cache_hits_total"]
    lags = [f"event_loop_lag_seconds_count[{process}]" for process in ("api", "tokenizer", "core", "detokenizer")]
    until(lambda: all(map(samples(server).__getitem__, lags)), "each process has seen how late its event loop is", 60)


def test_a_stream_ends_with_its_timings(server: Server) -> None:
    body = {**CHAT, "stream": True, "n": 2, "return_timings": True}
    text = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=60).text
    *_, last, done = text.split("\n\n")[:-1]
    assert done == "data: [DONE]" and '"choices":[],"object"' in last.replace(" ", "") and '"decode_ms"' in last
    assert text.count("timings") == 1


def test_disconnects_and_refusals_are_counted_by_reason(server: Server) -> None:
    server.wait_idle()  # requests of other tests may be given up late
    before = samples(server)
    left, kind = 0, "request_aborts_total[client_gone]"
    body = {"prompt": "a", "stream": True, "ignore_eos": True, "max_tokens": 7000}

    def is_counted() -> bool:
        """On a busy machine a stream may end before it is left."""
        nonlocal left
        with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60) as response:
            next(response.iter_lines())
        left += 1
        return samples(server)[kind] > before[kind]

    until(is_counted, "a disconnect is counted", 60)
    server.wait_idle()
    assert before[kind] < samples(server)[kind] <= before[kind] + left
    too_long = {"prompt": "word " * 50_000, "max_tokens": 1}
    assert httpx.post(f"{server.url}/v1/completions", json=too_long, timeout=60).status_code == 400
    kind = "request_errors_total[context_length_exceeded]"
    until(lambda: samples(server)[kind] == before[kind] + 1, "the refusal is counted", 60)


def test_request_logs_spans_and_the_metrics_prefix_of_vllm(start: Callable[..., Server], collector: Collector) -> None:
    flags = ("--enable-log-requests", "--otlp-traces-endpoint", collector.url, "--metrics-prefix", "vllm")
    server = start(*flags, environment={"OTEL_BSP_SCHEDULE_DELAY": "200"}).wait_ready()
    url = f"{server.url}/v1/completions"
    headers = {"x-request-id": "mine-1", "traceparent": f"00-{TRACE}-{CALLER}-01"}
    asked = {**CHAT, "max_tokens": 5}
    answer = httpx.post(f"{server.url}/v1/chat/completions", json=asked, headers=headers, timeout=60).json()
    usage = answer["usage"]
    unsampled = {"traceparent": f"00-{TRACE}-{CALLER}-00"}
    httpx.post(url, json={"prompt": "abc", "max_tokens": 2}, headers=unsampled, timeout=60)
    refused = httpx.post(url, json={"prompt": "word " * 50_000}, headers={"x-request-id": "b"}, timeout=60)
    assert refused.status_code == 400
    until(lambda: server.metric("vllm:request_success_total") == 3, "the requests are counted", 60)
    assert "pagewire:" not in server.get("/metrics")
    command = [sys.executable, "-m", "pagewire", "top", "--once", "--interval", "0.1", "--url", server.url]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    assert re.search(r"ended: length +2", shown)
    until(lambda: len(collector.spans) == 7, "the spans are exported", 60)
    assert server.stop() == 0

    lines = [line for line in server.log.read_text().splitlines() if "request_id=" in line]
    assert len(lines) == 3
    numbers = f"sequences=1 prompt={usage['prompt_tokens']} cached=0 output=5"
    pattern = (
        rf"request_id=mine-1 path=/v1/chat/completions ended=length {numbers} tokenizer_queue_ms=[\d.]+ .*total_ms="
    )
    assert re.search(pattern, lines[0]), lines[0]
    assert "request_id=b path=/v1/completions ended=error:context_length_exceeded sequences=1 prompt=0" in lines[2]
    assert not any("Count from" in line or "word" in line for line in lines)

    assert collector.paths == {"/v1/traces"}
    spans = {span.name: span for span in collector.spans if span.trace_id.hex() == TRACE}
    assert set(spans) == {"chat pagewire-demo", "tokenizer_queue", "tokenize", "queue", "prefill", "decode"}
    root = spans.pop("chat pagewire-demo")
    assert root.parent_span_id.hex() == CALLER
    assert all(span.parent_span_id == root.span_id for span in spans.values())
    ends = [root.start_time_unix_nano, *(span.end_time_unix_nano for span in spans.values())]
    assert ends == sorted(ends) and abs(ends[-1] - root.end_time_unix_nano) < 1000
    values = attributes(root)
    assert values["gen_ai.operation.name"] == "chat" and values["gen_ai.request.model"] == "pagewire-demo"
    assert values["gen_ai.usage.input_tokens"] == usage["prompt_tokens"] and values["gen_ai.usage.output_tokens"] == 5
    assert values["gen_ai.response.finish_reasons"] == ["length"] and values["gen_ai.request.max_tokens"] == 5
    assert values["http.request.header.x-request-id"] == ["mine-1"]
    failed = next(span for span in collector.spans if span.name.startswith("text_completion"))
    assert attributes(failed)["error.type"] == "error:context_length_exceeded" and failed.status.code == 2
    assert failed.parent_span_id == b"" and len(collector.spans) == 7


def test_what_the_machine_does_is_plausible(start: Callable[..., Server]) -> None:
    server = start("--kv-cache-memory", "64M").wait_ready()
    measured = "memory_bandwidth_bytes_per_second[measured]"

    def now(name: str) -> float:
        return samples(server).get(name, 0.0)

    def have_all_reported() -> bool:
        known = samples(server)
        processes = ("api", "tokenizer", "core", "detokenizer", "grammar", "worker")
        named = all(f"process_cpu_seconds_total[{name}]" in known for name in processes)
        return named and known.get("worker_memory_bytes[weights]", 0.0) > 0

    until(have_all_reported, "all processes report", 60)
    first = samples(server)
    pagewire_weights = first["worker_memory_bytes[weights]"]
    assert 3 << 20 < pagewire_weights < 64 << 20, "the demo model has 2 million parameters"
    cache = sum(first[f"worker_memory_bytes[kv_{kind}]"] for kind in ("used", "cached", "free"))
    assert 60 << 20 < cache <= 64 << 20 and first["worker_memory_bytes[kv_used]"] == 0
    assert first["worker_memory_bytes[workspace]"] > 0
    resident = sum(first[f"process_resident_memory_bytes[worker][{kind}]"] for kind in ("anonymous", "file", "shared"))
    assert resident > pagewire_weights and first["process_threads[worker]"] >= 1
    assert measured not in first, "it is measured in an engine that was used"

    def ask(max_tokens: int = 2000) -> None:
        body = {"prompt": "Count from 1 to 20", "max_tokens": max_tokens, "ignore_eos": True}
        httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).raise_for_status()

    def ask_until_seen() -> None:
        while not is_seen.is_set():
            ask()

    def share() -> float:
        """Of the bandwidth, in the last ten seconds; if it was known later than that, other steps are needed."""
        if not (ratio := now("memory_roof_ratio")):
            ask(100)
        return ratio

    is_seen = threading.Event()
    with ThreadPoolExecutor(1) as asking:
        asked = asking.submit(ask_until_seen)
        try:
            until(lambda: now("worker_memory_bytes[kv_used]") > 0, "the KV of a request is in use", 60)
        finally:
            is_seen.set()
    asked.result()
    until(lambda: now("worker_memory_bytes[kv_used]") == 0, "its KV is given back", 60)
    until(lambda: now(measured) > 0, "the bandwidth is measured when the engine is idle", 120)
    assert until(share, "the share of it that steps use is known", 60) < 100
    last = samples(server)
    assert last["worker_memory_bytes[kv_cached]"] > 0
    assert last["process_cpu_seconds_total[worker]"] > first["process_cpu_seconds_total[worker]"] > 0
    assert last["estimated_read_bytes_per_gpu_total"] >= 1999 * 0.9 * pagewire_weights
    assert 1e8 < last[measured] < 1e13
