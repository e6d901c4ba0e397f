"""The checks of every request: API keys, request ids, hosts, origins; and the small endpoints."""

import json
from typing import Any

import pytest
from harness import Client, FakeEngine, chat, complete, make_app, request, run
from prometheus_client.parser import text_string_to_metric_families

from pagewire.api.web.page import PAGE_FILES
from pagewire.ipc.messages import GroupSnapshot, Snapshot, TierSnapshot

OPEN = ("/health", "/ping", "/ready", "/version")
ROUTES = [
    *sorted(
        (method, route.path)
        for route in make_app(FakeEngine())._app.routes
        if route.path not in (*OPEN, *PAGE_FILES)
        for method in route.methods - {"HEAD"}
    ),
    ("GET", "/nothing"),
    ("OPTIONS", "/v1/models"),
]
KEYS: dict[str, Any] = {"api_keys": ("first", "second")}


@pytest.mark.parametrize(("method", "path"), ROUTES)
@pytest.mark.parametrize(
    "authorization", [None, "", "Bearer", "Bearer wrong", "first", "Basic first", "Bearer firs", "Bearer first second"]
)
def test_requests_without_a_valid_key_are_refused(method: str, path: str, authorization: str | None) -> None:
    headers = {} if authorization is None else {"authorization": authorization}
    engine = FakeEngine()
    answer = request(engine, path, b"{}", method=method, headers=headers, **KEYS)
    if path.startswith("/v1/messages"):
        assert answer.json["type"] == "error" and answer.json["error"]["type"] == "authentication_error"
    elif path.startswith("/api/"):
        assert answer.json.keys() == {"error"} and "key" in answer.json["error"]
    else:
        assert answer.error["code"] == "invalid_api_key"
    assert answer.status == 401 and not engine.submits


@pytest.mark.parametrize(
    "path", ["/health/../metrics", "/health%2f..%2fmetrics", "/HEALTH", "/metrics;/health", "//health"]
)
def test_unusual_paths_do_not_bypass_the_key(path: str) -> None:
    assert request(FakeEngine(), path, **KEYS).status == 401


@pytest.mark.parametrize("path", OPEN)
def test_health_readiness_and_version_need_no_key(path: str) -> None:
    assert request(FakeEngine(), path, **KEYS).status == 200


@pytest.mark.parametrize("key", ["first", "second"])
def test_every_key_is_accepted_in_either_header(key: str) -> None:
    headers = {"authorization": f"Bearer {key}"}
    assert request(FakeEngine(), "/v1/models", headers=headers, **KEYS).status == 200
    assert request(FakeEngine(), "/load", headers={"authorization": f"bearer  {key}"}, **KEYS).status == 200
    assert request(FakeEngine(), "/load", headers={"x-api-key": key}, **KEYS).status == 200
    assert request(FakeEngine(), "/load", headers={"x-api-key": key, "authorization": "x"}, **KEYS).status == 401
    assert request(FakeEngine(), "/load", headers={"x-api-key": "third"}, **KEYS).status == 401


def test_two_keys_never_share_the_prefix_cache() -> None:
    salts = set()
    body: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}
    for key in ("first", "second"):
        engine = FakeEngine()
        request(engine, "/v1/chat/completions", body, headers={"authorization": f"Bearer {key}"}, **KEYS)
        salts.add(engine.submits[0].salt)
    assert len(salts) == 2 and b"" not in salts
    engine = FakeEngine()
    request(engine, "/v1/chat/completions", body, headers={"authorization": "Bearer one"}, api_keys=("one",))
    assert engine.submits[0].salt == b""


@pytest.mark.parametrize(
    ("path", "body"),
    [("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}), ("/v1/embeddings", {"input": "hi"})],
)
def test_the_tenant_is_the_key_whatever_user_is_sent(path: str, body: dict[str, Any]) -> None:
    tenants = set()
    for key, user in (("first", "a"), ("first", "b"), ("second", "a")):
        engine = FakeEngine()
        request(engine, path, {**body, "user": user}, headers={"authorization": f"Bearer {key}"}, **KEYS)
        tenants.add((key, engine.submits[0].tenant))
    assert len(tenants) == len({tenant for _, tenant in tenants}) == 2


@pytest.mark.parametrize(
    ("sent", "echoed"),
    [("abc-123", True), ("x" * 128, True), ("x" * 129, False), ("", False), ("a b", False), ("é", False)],
)
def test_only_valid_request_ids_are_echoed(sent: str, echoed: bool) -> None:
    for path in ("/health", "/nothing"):
        got = request(FakeEngine(), path, headers={"x-request-id": sent}).headers["x-request-id"]
        assert (got == sent) is echoed and got
    assert (
        request(FakeEngine(), "/health").headers["x-request-id"]
        != request(FakeEngine(), "/health").headers["x-request-id"]
    )


@pytest.mark.parametrize("host", ["a/?x=", "a b", "", "evil\\host", "a:b", "x" * 300, "[::1", "user@host"])
def test_malformed_hosts_are_refused(host: str) -> None:
    assert request(FakeEngine(), "/health", headers={"host": host}).status == 400


LOCAL_HOSTS = ["localhost", "LocalHost:8000", "a.localhost", "127.0.0.1:8000", "192.168.1.9", "[::1]:8000"]


@pytest.mark.parametrize("host", [*LOCAL_HOSTS, "my-host.example.org", "evil.localhost.example"])
def test_other_host_names_are_accepted_only_on_all_interfaces(host: str) -> None:
    same = {"host": host, "origin": f"http://{host}"}
    assert request(FakeEngine(), "/health", headers=same, host="0.0.0.0").status == 200
    assert request(FakeEngine(), "/health", headers={"host": host}).status == (200 if host in LOCAL_HOSTS else 403)


@pytest.mark.parametrize("origin", ["http://evil.example", "null", "http://localhost:1"])
def test_other_origins_are_refused(origin: str) -> None:
    assert request(FakeEngine(), "/v1/models", headers={"origin": origin}).status == 403


def test_dns_rebinding_is_refused() -> None:
    """A browser takes the pages of the rebound name to be of our origin."""
    key = {"authorization": "Bearer one"}
    without_origin: dict[str, str] = {"host": "evil.example:8000"}  # as browsers send a GET to the page's own origin
    for rebound in (without_origin, without_origin | {"origin": "http://evil.example:8000"}):
        refused = request(FakeEngine(), "/v1/models", headers=rebound)
        assert refused.status == 403 and "--allowed-origins" in refused.error["message"]
        for path in ("/", "/health", "/metrics"):
            assert request(FakeEngine(), path, headers=rebound).status == 403
        for allowed in ("http://evil.example:8000", "https://Evil.example", "*"):
            config: Any = {"allowed_origins": (allowed,)}
            assert request(FakeEngine(), "/v1/models", headers=rebound, **config).status == 200
        assert request(FakeEngine(), "/v1/models", headers=rebound | key, api_keys=("one",)).status == 200
        assert request(FakeEngine(), "/v1/models", headers=rebound, uds="/run/pagewire").status == 200
        assert request(FakeEngine(), "/v1/models", headers=rebound, host="::").status == 200
        assert request(FakeEngine(), "/v1/models", headers=rebound, host="::1").status == 403
    local = {"host": "[::1]:8000", "origin": "http://[::1]:8000"}
    assert request(FakeEngine(), "/v1/models", headers=local).status == 200


@pytest.mark.parametrize(("allowed", "allow_origin"), [("https://app.example", "https://app.example"), ("*", "*")])
def test_allowed_origins(allowed: str, allow_origin: str) -> None:
    headers = {"origin": "https://app.example"}
    config: Any = {"allowed_origins": (allowed,), "api_keys": ("one",)}
    good = request(FakeEngine(), "/v1/models", headers=headers | {"authorization": "Bearer one"}, **config)
    bad = request(FakeEngine(), "/v1/models", headers=headers, **config)
    assert (good.status, bad.status) == (200, 401)
    large = {"authorization": "Bearer one", "content-length": "99999999"}
    too_large = request(FakeEngine(), "/v1/completions", b"{}", headers=headers | large, **config)
    assert too_large.status == 413
    for answer in (good, bad, too_large):
        assert answer.headers["access-control-allow-origin"] == allow_origin
        assert "x-request-id" in answer.headers["access-control-expose-headers"]
        assert (answer.headers.get("vary") == "origin") == (allow_origin != "*")
    other = request(FakeEngine(), "/v1/models", headers={"origin": "https://other.example"}, **config)
    assert other.status == (401 if allowed == "*" else 403)
    assert ("access-control-allow-origin" in other.headers) == (allowed == "*")
    assert "access-control-allow-origin" not in request(FakeEngine(), "/health", **config).headers


def test_preflight() -> None:
    preflight = {
        "origin": "https://app.example",
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization,content-type, x-stainless-os",
    }
    config: Any = {"allowed_origins": ("https://app.example",), "api_keys": ("one",)}
    answer = request(FakeEngine(), "/v1/chat/completions", method="OPTIONS", headers=preflight, **config)
    assert answer.status == 204 and answer.body == b""
    assert answer.headers["access-control-allow-origin"] == "https://app.example"
    assert answer.headers["access-control-allow-headers"] == preflight["access-control-request-headers"]
    assert "POST" in answer.headers["access-control-allow-methods"]
    for change, status in (
        ({"origin": "https://other.example"}, 403),
        ({"access-control-request-headers": "a\r\nb: c"}, 204),
    ):
        answer = request(FakeEngine(), "/v1/models", method="OPTIONS", headers=preflight | change, **config)
        assert answer.status == status and "access-control-allow-headers" not in answer.headers


@pytest.mark.parametrize("path", ["/llm/v1/models", "/v1/models"])
def test_a_proxy_may_strip_the_root_path_or_keep_it(path: str) -> None:
    assert request(FakeEngine(), path, root_path="/llm").status == 200
    assert request(FakeEngine(), path, root_path="/llm", **KEYS).status == 401
    assert request(FakeEngine(), "/llm/health", root_path="/llm", **KEYS).status == 200
    assert request(FakeEngine(), "/llm/", root_path="/llm").headers["content-type"].startswith("text/html")
    bare = request(FakeEngine(), "/llm", root_path="/llm")
    assert (bare.status, bare.headers["location"]) == (308, "/llm/")
    for other in ("/llmv1/models", "/llm/llm/v1/models", "/LLM/v1/models"):
        assert request(FakeEngine(), other, root_path="/llm").status == 404


def test_a_repeated_authorization_header_is_refused() -> None:
    twice = [(b"host", b"localhost"), (b"authorization", b"Bearer first"), (b"authorization", b"Bearer second")]
    scope = {"type": "http", "method": "GET", "path": "/v1/models", "query_string": b"", "headers": twice}
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    run(make_app(FakeEngine(), **KEYS)(scope, None, send))
    assert sent[0]["status"] == 400 and b"only one authorization header" in sent[1]["body"]


def test_max_body_size_bounds_the_body() -> None:
    body = json.dumps({"prompt": "x"}).encode()
    for size, status in ((len(body), 200), (len(body) - 1, 413)):
        assert request(FakeEngine(), "/v1/completions", body, max_body_size=size).status == status
        headers = {"content-length": str(len(body))}
        assert request(FakeEngine(), "/v1/completions", body, headers=headers, max_body_size=size).status == status


def test_an_incomplete_body_times_out() -> None:
    async def work() -> Any:
        client = Client(make_app(FakeEngine(), body_timeout_s=0.01))
        return await client.call("POST", "/v1/completions", b"{", whole=False)

    assert run(work()).status == 408


def test_a_file_upload_that_pauses_times_out() -> None:
    async def work() -> Any:
        app = make_app(FakeEngine(), body_timeout_s=0.01, max_body_size=1024)
        headers = {"content-type": "multipart/form-data; boundary=b", "content-length": "500"}
        return await Client(app).call("POST", "/v1/files", b"--b\r\n", headers, whole=False)

    assert run(work()).status == 408


@pytest.mark.parametrize("stream", [True, False])
def test_a_request_timeout_cancels_the_request(stream: bool) -> None:
    async def work() -> None:
        engine = FakeEngine()
        engine.hold = True
        client = Client(make_app(engine, request_timeout_s=0.2))
        answer = await client.call("POST", "/v1/completions", json.dumps({"prompt": "x", "stream": stream}).encode())
        error = answer.events[-1]["error"] if stream else answer.error
        assert answer.status == (200 if stream else 504) and "[DONE]" not in answer.body.decode()
        assert error["code"] == "request_timeout" and "0.2 s" in error["message"]
        assert engine.cancels and not engine.open
        assert engine.gateway.stats.aborts["request_timeout"] == 1

    run(work())


def test_the_access_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "pagewire.access")
    headers = {"authorization": "Bearer first", "x-request-id": "mine"}
    complete(FakeEngine(), prompt="a secret")
    request(FakeEngine(), "/v1/models", headers=headers, **KEYS)
    request(FakeEngine(), "/v1/a\nb\x1b[31m\u2028", headers=headers, **KEYS)
    request(FakeEngine(), "/health")
    request(FakeEngine(), "/health", headers={"host": "a b"})
    lines = [record.getMessage() for record in caplog.records if record.name == "pagewire.access"]
    assert [line.split()[1:4] for line in lines] == [
        ["POST", "/v1/completions", "200"],
        ["GET", "/v1/models", "200"],
        ["GET", "/v1/a\\nb\\x1b[31m\\xe2\\x80\\xa8", "404"],
        ["GET", "/health", "400"],
    ]
    assert lines[1].endswith(" mine") and not any("secret" in line or "first" in line for line in lines)
    caplog.clear()
    request(FakeEngine(), "/v1/models", access_log=False)
    assert not caplog.records


@pytest.mark.parametrize("length", ["-1", "x", "1e3", "9" * 30])
def test_malformed_content_lengths_are_refused(length: str) -> None:
    assert request(FakeEngine(), "/v1/completions", b"{}", headers={"content-length": length}).status in (400, 413)


def test_models() -> None:
    cards = request(FakeEngine(), "/v1/models").json
    assert cards["object"] == "list" and [card["id"] for card in cards["data"]] == ["demo", "org/demo-alias"]
    card = request(FakeEngine(), "/v1/models/org/demo-alias").json
    assert (card["id"], card["object"], card["max_model_len"]) == ("org/demo-alias", "model", 128)


def test_version() -> None:
    assert request(FakeEngine(), "/version").json == {"version": "1.2.3"}


def test_an_unresponsive_engine_is_a_503() -> None:
    trouble: Any = {"healthy": lambda: "The engine has not answered for 12 s."}
    for answer in (
        request(FakeEngine(), "/health", **trouble),
        request(FakeEngine(), "/v1/completions", {"prompt": "x"}, **trouble),
    ):
        assert (answer.status, answer.error["code"]) == (503, "engine_unavailable")
        assert answer.headers["retry-after"] == "1" and "12 s" in answer.error["message"]


def test_health_says_what_the_engine_waits_for_while_it_goes_on() -> None:
    engine = FakeEngine()
    assert request(engine, "/health").json == {"status": "ok"}
    waits_for = "waiting for a node for worker-1, because b leaves"
    engine.gateway.waits_for = waits_for
    answer = request(engine, "/health")
    assert answer.status == 200 and answer.json == {"status": "ok", "waits_for": waits_for}


def metrics(engine: FakeEngine) -> dict[str, float]:
    answer = request(engine, "/metrics")
    assert answer.headers["content-type"].startswith("text/plain")
    samples = [sample for family in text_string_to_metric_families(answer.body.decode()) for sample in family.samples]
    assert all(sample.labels["model_name"] == "demo" for sample in samples)
    return {
        sample.name
        + "".join(
            f"[{sample.labels[k]}]" for k in ("finished_reason", "reason", "tier", "le") if k in sample.labels
        ): sample.value
        for sample in samples
    }


def test_metrics() -> None:
    engine = FakeEngine()
    chat(engine, n=2)
    assert chat(engine, temperature=3).status == 400 and request(engine, "/nothing").status == 404
    before = metrics(engine)
    assert before["pagewire:request_refused_total[400]"] == before["pagewire:request_refused_total[not_found]"] == 1
    assert before["pagewire:num_requests_running"] == 0
    assert before["pagewire:request_success_total[stop]"] == 2
    assert before["pagewire:time_to_first_token_seconds_count"] == 2
    assert before["pagewire:inter_token_latency_seconds_count"] == 2
    assert before["pagewire:e2e_request_latency_seconds_bucket[+Inf]"] == 2
    engine.gateway.handle([Snapshot(9, 3, 2, 100, 25, 1, 70, 30, 44, 0.5, (), 5, 20, 8)])
    after = metrics(engine)
    assert after["pagewire:num_requests_running"] == 3 and after["pagewire:num_requests_waiting"] == 2
    assert after["pagewire:kv_cache_usage_perc"] == 0.25 and after["pagewire:num_preemptions_total"] == 1
    assert after["pagewire:prompt_tokens_total"] == 70 and after["pagewire:generation_tokens_total"] == 44
    assert after["pagewire:prefix_cache_hits_total"] == 30
    kinds = ("num_drafts", "num_draft_tokens", "num_accepted_tokens")
    assert [after[f"pagewire:spec_decode_{kind}_total"] for kind in kinds] == [5, 20, 8]
    assert not any("external" in name or "tier" in name for name in after)


def test_metrics_of_the_cache_groups() -> None:
    engine = FakeEngine()
    groups = (
        GroupSnapshot("full", 5, 6, 70, 0),
        GroupSnapshot("state", 2, 1, 30, 9),
        GroupSnapshot("none", 0, 0, 4, 0),
    )
    engine.gateway.handle([Snapshot(9, 3, 2, 100, 25, 1, 700, 30, 44, 0.5, groups=groups)])
    page = request(engine, "/metrics").body.decode()
    for line in (
        'kv_group_pages{model_name="demo",group="0",kind="full",state="held"} 5',
        'kv_group_pages{model_name="demo",group="1",kind="state",state="idle"} 1',
        'prefix_cache_hits_by_limit_total{model_name="demo",group="1",kind="state"} 30',
        'prefix_cache_hits_by_limit_total{model_name="demo",group="none",kind="none"} 4',
        'prefix_cache_lost_total{model_name="demo",group="1",kind="state"} 9',
    ):
        assert f"pagewire:{line}" in page


def test_metrics_of_the_kv_tiers() -> None:
    engine = FakeEngine()
    tiers = (TierSnapshot("host", 10, 64, 320, 40, 30, 0), TierSnapshot("disk", 7, 0, 16, 9, 2, 1, 4096))
    engine.gateway.handle([Snapshot(9, 3, 2, 100, 25, 1, 700, 30, 44, 0.5, tiers)])
    samples = {name: value for name, value in metrics(engine).items() if "external" in name or "tier" in name}
    assert samples == {
        "pagewire:external_prefix_cache_queries_total": 670,
        "pagewire:external_prefix_cache_hits_total[host]": 320,
        "pagewire:external_prefix_cache_hits_total[disk]": 16,
        "pagewire:kv_tier_blocks[host]": 10,
        "pagewire:kv_tier_blocks[disk]": 7,
        "pagewire:kv_tier_capacity_blocks[host]": 64,
        "pagewire:kv_tier_capacity_blocks[disk]": 0,
        "pagewire:kv_tier_stored_blocks_total[host]": 40,
        "pagewire:kv_tier_stored_blocks_total[disk]": 9,
        "pagewire:kv_tier_evicted_blocks_total[host]": 30,
        "pagewire:kv_tier_evicted_blocks_total[disk]": 2,
        "pagewire:kv_tier_failed_blocks_total[host]": 0,
        "pagewire:kv_tier_failed_blocks_total[disk]": 1,
        "pagewire:kv_tier_loaded_bytes_total[host]": 0,
        "pagewire:kv_tier_loaded_bytes_total[disk]": 4096,
    }
