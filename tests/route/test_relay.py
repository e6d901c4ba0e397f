"""Requests through a router: the choice of engine, retries, resumed streams, and answers."""

import json
import re
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from typing import Any

import pytest
from harness import FakeEngine
from msgspec.structs import replace
from waiting import until

from pagewire.ipc.messages import Submit
from pagewire.tools.servers import free_port

from .routed import Answered, Behind, MortalEngine, Routed

PIECES = ["Hel", "lo ", "wor", "ld, ", "ag", "ain"]
TEXT = "".join(PIECES)
STREAM: dict[str, Any] = {"stream": True, "max_tokens": 50}
# An engine's load that was said during a request and is read after it counts as another router's.
no_stale_loads = pytest.mark.usefixtures("no_own_checks")


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def serve(stack: ExitStack, *engines: FakeEngine, **config: Any) -> list[Behind]:
    return [stack.enter_context(Behind(engine, **config)) for engine in engines]


def num_submits(engines: list[Behind]) -> list[int]:
    return [len(engine.engine.submits) for engine in engines]


def test_requests_and_answers_are_passed_through(stack: ExitStack) -> None:
    engines = serve(stack, FakeEngine(PIECES))
    router = stack.enter_context(Routed(*engines))
    answer = router.complete(max_tokens=50)
    assert answer.status == 200 and answer.json["choices"][0]["text"] == TEXT
    assert router.ask("/v1/models").json["data"][0]["id"] == "demo"
    assert b"<html" in router.ask("/").body
    assert router.complete(max_tokens=-1).json["error"]["param"] == "max_tokens"
    assert router.ask("/v1/nothing").status == 404
    assert router.ask("/v1/completions", b"{").code == "invalid_json"
    assert router.ask("/v1/models", x_request_id="abc").headers["x-request-id"] == "abc"
    assert router.ask("/v1/files").json["data"] == []


def test_invalid_requests_are_refused_by_the_engine(stack: ExitStack) -> None:
    engines = serve(stack, FakeEngine(PIECES))
    router = stack.enter_context(Routed(*engines))
    stream = b'"stream": true'
    deep, numbers = b"[" * 3000 + b"]" * 3000, b"1e999, 123456789012345678901234567890, 0.5"
    for prompt in (
        deep,
        b"[" + numbers + b"]",
        b'["\\ud800"]',
        b'"\xff"',
        b"[[1], 2]",
        b"[]",
        b"null",
        b"{}",
        b'["a", 1]',
    ):
        for body in (b'{"prompt": %b, %b}' % (prompt, stream), b'{"messages": %b, %b}' % (prompt, stream)):
            for path in ("/v1/completions", "/v1/chat/completions"):
                answer = router.ask(path, body)
                assert answer.status == 400 and answer.json["error"]["message"], (path, body[:80])
    for body in (
        b'{"prompt": "x", "stream": 3}',
        b'{"prompt": "x", "n": 1e30, %b}' % stream,
        b"[]",
        b"\xff",
        b"",
        b'{"\xff": 1, "prompt": "x", %b}' % stream,
    ):
        assert router.ask("/v1/completions", body).status == 400, body


@pytest.mark.parametrize(("return_token_ids", "logprobs"), [(False, None), (False, 2), (True, 0)])
def test_a_stream_is_the_same_without_a_router(stack: ExitStack, return_token_ids: bool, logprobs: int | None) -> None:
    engine = FakeEngine(PIECES)
    (served,) = serve(stack, engine)
    router = stack.enter_context(Routed(served))
    body = {"prompt": "abc", **STREAM, "return_token_ids": return_token_ids, "logprobs": logprobs, "seed": 5, "n": 2}
    body["stream_options"] = {"include_usage": True}
    found = []
    for url in (router.url, served.address):
        router.url = url
        events = router.ask("/v1/completions", body).events
        found.append([{**event, "id": 0, "created": 0} for event in events[:-1]] + events[-1:])
    assert found[0] == found[1]


def test_the_router_gives_each_stream_a_seed(stack: ExitStack) -> None:
    (served,) = engines = serve(stack, FakeEngine(PIECES))
    router = stack.enter_context(Routed(*engines))
    assert router.complete(**STREAM).text == router.complete(**STREAM, seed=9).text == TEXT
    assert router.complete(**STREAM, prompt=["a", "b"], temperature=1).events[-1] == "[DONE]"
    first, second, *several = served.engine.submits
    assert first.text.prompt and first.sampling.seed != second.sampling.seed == 9
    assert len({submit.sampling.seed for submit in several}) == 2, "each prompt has a seed of its own"


@pytest.mark.parametrize(
    "encodings", [(b"identity", b"chunked"), (b"chunked", b"chunked"), (b"gzip, chunked",), (b"x",)]
)
def test_a_body_of_unclear_length_is_refused(stack: ExitStack, encodings: tuple[bytes, ...]) -> None:
    (engine,) = serve(stack, FakeEngine(PIECES))
    router = stack.enter_context(Routed(engine))
    head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    head += b"".join(b"transfer-encoding: %b\r\n" % encoding for encoding in encodings)
    with socket.create_connection(("127.0.0.1", int(router.url.rpartition(":")[2])), timeout=10) as connection:
        connection.sendall(
            head + b'\r\nf\r\n{"prompt": "x"}\r\n0\r\n\r\n' + b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n"
        )
        received = b""
        while part := connection.recv(1 << 16):
            received += part
    assert received.startswith(b"HTTP/1.1 400") and received.count(b"HTTP/1.1 ") == 1
    assert not engine.engine.submits


@no_stale_loads
def test_load_is_balanced(stack: ExitStack) -> None:
    engines = serve(stack, FakeEngine(PIECES), FakeEngine(PIECES))
    router = stack.enter_context(Routed(*engines))
    for i in range(6):
        assert router.complete(prompt=f"{i}").status == 200
    assert num_submits(engines) == [3, 3]


def test_a_request_goes_to_an_engine_that_serves_its_model(stack: ExitStack) -> None:
    names: tuple[tuple[str, ...], ...] = (("one",), ("two", "alias"))
    engines = [stack.enter_context(Behind(FakeEngine(PIECES), served_model_names=each)) for each in names]
    router = stack.enter_context(Routed(*engines))
    for i in range(4):
        assert router.complete(model="alias", prompt=f"{i}").status == 200
        assert router.complete(prompt=f"{i}").status == 200, "the first one"
        assert router.complete(model="three", prompt=f"{i}").status == 404
    assert num_submits(engines) == [4, 4]
    assert [engine["loaded"] for engine in router.ask("/health").json["engines"]] == [list(each) for each in names]


@no_stale_loads
def test_a_prompt_goes_to_the_engine_with_its_prefix(stack: ExitStack) -> None:
    engines = serve(stack, FakeEngine(PIECES), FakeEngine(PIECES))
    router = stack.enter_context(Routed(*engines))
    system = "You are a router's test. " * 60
    for i in range(5):
        assert router.complete(prompt=f"{system}{i}", truncate_prompt_tokens=5).status == 200
    assert sorted(num_submits(engines)) == [0, 5]
    assert router.metric("prefix_blocks_met_total") == 4 * (len(system) // 256)


def test_a_prefix_does_not_attract_requests_to_a_much_busier_engine(stack: ExitStack) -> None:
    engines = serve(stack, FakeEngine(PIECES), FakeEngine(PIECES), max_queued_requests=100)
    router = stack.enter_context(Routed(*engines))
    for engine in engines:
        engine.engine.hold = True
    threads = [
        threading.Thread(target=router.complete, kwargs={"prompt": "x" * 2000, "truncate_prompt_tokens": 5})
        for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    until(lambda: sum(num_submits(engines)) == 8, "all eight requests are submitted")
    assert min(num_submits(engines)) >= 2, "one engine of two does not get nearly all requests"
    for engine in engines:
        engine.engine.hold = False
        assert engine.engine.loop is not None
        engine.engine.loop.call_soon_threadsafe(engine.engine.go)
    for thread in threads:
        thread.join(10)


def test_a_request_is_retried_before_the_first_byte(stack: ExitStack) -> None:
    first = MortalEngine(PIECES, dies_at=0)
    engines = serve(stack, first, FakeEngine(PIECES))
    router = stack.enter_context(Routed(*engines))
    answers = [router.complete(prompt=f"{i}", max_tokens=50) for i in range(4)]
    assert [answer.json["choices"][0]["text"] for answer in answers] == [TEXT] * 4
    assert num_submits(engines) == [1, 4] and router.metric("retries_total") == 1
    assert [state["ready"] for state in router.ask("/health").json["engines"]] == [False, True]


@pytest.mark.parametrize(
    ("dies_at", "fields"),
    [(1, {}), (5, {"n": 3}), (3, {"return_token_ids": True, "logprobs": 1}), (2, {"echo": True, "logprobs": 0})],
)
def test_a_stream_resumes_on_another_engine(stack: ExitStack, dies_at: int, fields: dict[str, Any]) -> None:
    healthy = FakeEngine(PIECES)
    engines = serve(stack, MortalEngine(PIECES, dies_at=dies_at), healthy)
    router = stack.enter_context(Routed(*engines))
    broken = router.complete(**STREAM, **fields, stream_options={"include_usage": True})
    undisturbed = router.complete(**STREAM, **fields, stream_options={"include_usage": True})
    assert num_submits(engines)[0] == 1 and router.metric("resumes_total") == 1
    assert healthy.submits[0].sampling.seed == engines[0].engine.submits[0].sampling.seed
    assert len({event["id"] for event in broken.events[:-1]}) == 1
    assert assembled(broken.events) == assembled(undisturbed.events)


def assembled(events: list[Any]) -> dict[Any, Any]:
    """All that a stream contains, assembled by choice."""
    assert events[-1] == "[DONE]"
    found: dict[Any, Any] = {"usage": [event["usage"] for event in events[:-1] if event.get("usage")]}
    for event in events[:-1]:
        for choice in event["choices"]:
            own = found.setdefault(choice["index"], {"text": "", "ids": [], "logprobs": [], "offsets": [], "ends": []})
            own["text"] += choice["text"]
            own["ids"] += choice.get("token_ids", [])
            own["ends"] += [choice["finish_reason"]] if choice["finish_reason"] else []
            own["logprobs"] += (choice["logprobs"] or {}).get("tokens", [])
            own["offsets"] += (choice["logprobs"] or {}).get("text_offset", [])
    return found


TYPED: dict[str, dict[str, Any]] = {
    "/v1/messages": {"messages": [{"role": "user", "content": "abc"}], "max_tokens": 50, "stream": True},
    "/v1/responses": {"input": "abc", "stream": True},
}


def typed_text(answer: Answered) -> str:
    """The text of a stream of typed events, which must have ended without an error."""
    *blocks, rest = answer.body.decode().split("\n\n")
    assert rest == "" and all(block.startswith("event: ") for block in blocks), (
        "comments between servers are not passed on"
    )
    events = [json.loads(block.partition("data: ")[2]) for block in blocks]
    assert events[-1]["type"] in ("message_stop", "response.completed"), events[-1]
    assert len({event["message"]["id"] for event in events if "message" in event}) in (0, 1)
    deltas = [event["delta"] for event in events if event["type"].endswith(("text.delta", "block_delta"))]
    return "".join(delta if isinstance(delta, str) else delta["text"] for delta in deltas)


@pytest.mark.parametrize("path", TYPED)
@pytest.mark.parametrize("dies_at", [0, 1, 3, 5])
def test_a_stream_of_typed_events_resumes_on_another_engine(stack: ExitStack, path: str, dies_at: int) -> None:
    healthy = FakeEngine(PIECES)
    engines = serve(stack, MortalEngine(PIECES, dies_at=dies_at), healthy)
    router = stack.enter_context(Routed(*engines))
    assert [typed_text(router.ask(path, TYPED[path])) for _ in range(2)] == [TEXT] * 2
    assert num_submits(engines)[0] == 1 and router.metric("resumes_total") == 1
    assert healthy.submits[0].sampling.seed == engines[0].engine.submits[0].sampling.seed
    assert bool(healthy.submits[0].resume_ids) == (dies_at > 1), "tokens of the last event are sampled again"


def test_a_resumed_response_is_stored_by_the_engine_that_ended_it(stack: ExitStack) -> None:
    engines = serve(stack, MortalEngine(PIECES, dies_at=3), FakeEngine(PIECES))
    router = stack.enter_context(Routed(*engines))
    stream = router.ask("/v1/responses", TYPED["/v1/responses"]).body.decode()
    ids = set(re.findall(r'"id":"(resp_[^"]+)"', stream))
    assert len(ids) == 1
    (id,) = ids
    stored = router.ask(f"/v1/responses/{id}").json
    assert (stored["id"], stored["output"][0]["content"][0]["text"]) == (id, TEXT)
    assert f'"item_id":"{stored["output"][0]["id"]}"' in stream
    assert router.ask("/v1/responses", {"input": "more", "previous_response_id": id}).status == 200


@pytest.mark.parametrize("path", ["/v1/completions", *TYPED])
def test_a_shutdown_of_an_engine_breaks_no_stream(stack: ExitStack, path: str) -> None:
    stopping = FakeEngine(PIECES)
    engines = serve(stack, stopping, FakeEngine(PIECES))
    router = stack.enter_context(Routed(*engines))
    stopping.hold = True
    texts: list[str] = []

    def stream() -> None:
        texts.append(typed_text(router.ask(path, TYPED[path])) if path in TYPED else router.complete(**STREAM).text)

    thread = threading.Thread(target=stream)
    thread.start()
    until(lambda: stopping.submits, "the engine has the request")
    assert stopping.loop is not None
    stopping.loop.call_soon_threadsafe(stopping.gateway.close, "The server is shutting down.")
    thread.join(10)
    assert texts == [TEXT]
    router.wait_ready(1)
    assert [router.complete(prompt=f"{i}").status for i in range(3)] == [200] * 3
    assert num_submits(engines) == [1, 4]


def test_requests_of_a_full_engine_go_to_another_until_all_are_full(stack: ExitStack) -> None:
    full, free = FakeEngine(PIECES), FakeEngine(PIECES)
    full.refuse = ("queue_full", "The queue is full.")
    engines = serve(stack, full, free)
    router = stack.enter_context(Routed(*engines))
    assert [router.complete(prompt=f"{i}").status for i in range(3)] == [200] * 3
    free.refuse = full.refuse
    answer = router.complete()
    assert (answer.status, answer.code) == (429, "queue_full") and answer.headers["retry-after"]


@no_stale_loads
def test_internal_errors_of_an_engine_are_not_retried(stack: ExitStack) -> None:
    engine = FakeEngine(PIECES)
    engine.fail_after = 2
    engines = serve(stack, engine, FakeEngine(PIECES))
    router = stack.enter_context(Routed(*engines))
    answers = [router.complete(prompt=f"{i}").status for i in range(2)]
    assert sorted(answers) == [200, 500] and num_submits(engines) == [1, 1]
    ends = [router.complete(prompt=f"{i}", **STREAM).events[-1] for i in range(2)]
    assert sum(end != "[DONE]" and "error" in end for end in ends) == 1


def test_a_request_that_kills_engines_is_given_up(stack: ExitStack) -> None:
    engines = serve(stack, *(MortalEngine(PIECES, dies_at=2) for _ in range(2)), MortalEngine(PIECES, dies_at=2))
    router = stack.enter_context(Routed(*engines))
    *_, last = router.complete(**STREAM, temperature=0).events
    assert last["error"]["code"] == "engine_unavailable" and "not tried again" in last["error"]["message"]
    assert sorted(num_submits(engines)) == [1, 1, 1], "the first engine had delivered new tokens"
    assert router.metric('failures_total{reason="fruitless"}') == 1


@pytest.mark.parametrize("fields", [{}, STREAM])
def test_a_request_on_which_engines_fail_is_given_up(stack: ExitStack, fields: dict[str, Any]) -> None:
    """The engines report their failure before their connections close."""
    mortal = [MortalEngine(PIECES, dies_at=0) for _ in range(3)]
    engines = serve(stack, *mortal)
    for engine in mortal:
        engine.on_death = partial(engine.gateway.close, "The engine has failed.", has_failed=True)
    router = stack.enter_context(Routed(*engines))
    answer = router.complete(**fields, temperature=0)
    error = answer.json["error"] if not fields else answer.events[-1]["error"]
    assert error["code"] == "engine_unavailable" and "2 engines were lost" in error["message"]
    assert sorted(num_submits(engines)) == [0, 1, 1]


class NonResumingEngine(FakeEngine):
    """An engine that ignores resume_token_ids and samples everything again."""

    def post(self, message: Any) -> None:
        is_submit = isinstance(message, Submit)
        super().post(replace(message, resume_ids=b"", resume_chars=0) if is_submit else message)


def test_a_stream_continues_on_an_engine_that_cannot_resume(stack: ExitStack) -> None:
    engines = serve(stack, MortalEngine(PIECES, dies_at=3), NonResumingEngine(PIECES))
    router = stack.enter_context(Routed(*engines))
    assert router.complete(**STREAM).text == TEXT


def test_a_stream_fails_if_the_next_engine_samples_other_tokens(stack: ExitStack) -> None:
    engines = serve(stack, MortalEngine(PIECES, dies_at=3), NonResumingEngine(["Something", " else"]))
    router = stack.enter_context(Routed(*engines))
    *_, last = router.complete(**STREAM).events
    assert "sampled other tokens" in last["error"]["message"]


def test_without_an_engine_requests_wait_and_then_fail(stack: ExitStack) -> None:
    port = free_port()
    router = stack.enter_context(Routed(f"http://127.0.0.1:{port}", wait=False, outage_wait=0.2))
    answer = router.complete()
    assert (answer.status, answer.code) == (503, "engine_unavailable") and answer.headers["retry-after"]
    assert router.ask("/ready").status == 503 and router.ask("/health").json["status"] == "no engine"


def test_a_waiting_request_is_served_when_the_engine_is_back(stack: ExitStack) -> None:
    port = free_port()
    router = stack.enter_context(Routed(f"http://127.0.0.1:{port}", wait=False))
    texts: list[str] = []
    thread = threading.Thread(target=lambda: texts.append(router.complete(**STREAM).text))
    thread.start()
    until(lambda: router.metric("open_requests"), "the request waits")
    listener = socket.create_server(("127.0.0.1", port))
    stack.enter_context(Behind(FakeEngine(PIECES), listener))
    thread.join(10)
    assert texts == [TEXT]


def test_a_disconnect_cancels_the_request_in_router_and_engine(stack: ExitStack) -> None:
    engine = FakeEngine(PIECES)
    engine.hold = True
    engines = serve(stack, engine)
    router = stack.enter_context(Routed(*engines))
    body = json.dumps({"prompt": "abc", **STREAM}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(body)}\r\n"
    head += "content-type: application/json\r\n"
    port = int(router.url.rpartition(":")[2])
    with socket.create_connection(("127.0.0.1", port)) as client:
        client.sendall(head.encode() + b"\r\n" + body)
        until(lambda: engine.open, "the engine has the request")
    until(lambda: not engine.open and not router.metric("open_requests"), "the request is cancelled")
    assert engine.cancels


def test_stored_responses_are_found_on_their_engine(stack: ExitStack) -> None:
    engines = serve(stack, FakeEngine(PIECES), FakeEngine(PIECES))
    router = stack.enter_context(Routed(*engines))
    ids = [router.ask("/v1/responses", {"input": f"{i}"}).json["id"] for i in range(4)]
    assert [router.ask(f"/v1/responses/{id}").json["id"] for id in ids] == ids
    for id in ids:
        answer = router.ask("/v1/responses", {"input": "more", "previous_response_id": id})
        assert answer.status == 200, answer.body
    assert router.ask("/v1/responses/resp_unknown").status == 404


def test_max_open_requests_bounds_each_key(stack: ExitStack) -> None:
    engine = FakeEngine(PIECES)
    engine.hold = True
    engines = serve(stack, engine, api_keys=("a", "b"))
    router = stack.enter_context(Routed(*engines, api_keys=("a", "b"), max_open_requests=1))
    assert router.complete().status == 401
    path, body = "/v1/completions", {"prompt": "x"}
    statuses: list[int] = []

    def ask(key: str) -> None:
        statuses.append(router.ask(path, body, x_api_key=key).status)

    threads = first, second = [threading.Thread(target=ask, args=(key,)) for key in "ab"]
    first.start()
    until(lambda: len(engine.open) == 1, "the engine has the request of a")
    second.start()
    until(lambda: len(engine.open) == 2, "the request of b is passed on while a is at its limit")
    for key in "ab":
        refused = router.ask(path, body, x_api_key=key)
        assert (refused.status, refused.code) == (429, "rate_limit_exceeded")
    assert engine.loop is not None
    engine.loop.call_soon_threadsafe(engine.go)
    for thread in threads:
        thread.join(10)
    assert statuses == [200, 200]
    assert [router.ask(path, body, x_api_key=key).status for key in "ab"] == [200, 200]


def test_an_administrator_adds_and_removes_engines(stack: ExitStack) -> None:
    engines = serve(stack, FakeEngine(PIECES), FakeEngine(PIECES))
    router = stack.enter_context(Routed(engines[0], admin_keys=["secret"]))
    bearer = {"authorization": "Bearer secret"}
    assert router.ask("/admin/engines").status == 401
    assert router.ask("/admin/engines", {"add": "nonsense"}, **bearer).json["error"]["param"] == "add"
    assert router.ask("/admin/engines", {}, **bearer).status == 400
    assert len(router.ask("/admin/engines", {"add": engines[1].address}, **bearer).json) == 2
    router.wait_ready(2)
    assert router.ask("/admin/engines", {"remove": engines[0].address}, **bearer).status == 200
    router.wait_ready(1)
    assert [router.complete(prompt=f"{i}").status for i in range(3)] == [200] * 3
    assert num_submits(engines) == [0, 3]
    assert router.ask("/admin/engines", {"remove": engines[0].address}, **bearer).status == 404


def test_without_an_admin_key_the_admin_endpoints_do_not_exist(stack: ExitStack) -> None:
    engines = serve(stack, FakeEngine(PIECES))
    router = stack.enter_context(Routed(*engines))
    assert router.ask("/admin/engines").status == 404
    assert router.ask("/admin/sleep", {}).status == 404


def test_a_router_that_stops_ends_streams_with_an_error_event(stack: ExitStack) -> None:
    engine = FakeEngine(PIECES)
    engine.hold = True
    engines = serve(stack, engine)
    with Routed(*engines) as router:
        stream = stack.enter_context(router.begin("/v1/completions", {"prompt": "abc", **STREAM}))
    answer = Answered(stream.status, dict(stream.headers), stream.read())
    assert answer.status == 200 and answer.events[-1]["error"]["code"] == "shutting_down"


KEYS = "p2p,{},key-file=/tmp/keys,role={}"
PREFILL = {"kv_connector": (KEYS.format("serve=tcp://127.0.0.1:7100", "prefill"),)}
DECODE = {"kv_connector": (KEYS.format("peer=named", "decode"),), "kv_peers": ("127.*",)}
LONG: dict[str, Any] = {"prompt": "a long prompt " * 200, "max_tokens": 50}


def wait_for_roles(router: Routed) -> None:
    engines = router.server.fleet.engines
    until(lambda: {engine.role for engine in engines} == {"prefill", "decode"}, "the router knows the roles")


def busy(router: Routed) -> None:
    """A stream at the decode engine, so that a prompt beside it is better computed elsewhere."""
    (decode,) = [engine for engine in router.server.fleet.engines if engine.role == "decode"]
    decode.num_open += 3


@pytest.mark.parametrize("streams", [False, True])
def test_a_long_prompt_goes_to_both_engines(stack: ExitStack, streams: bool) -> None:
    (prefill,) = serve(stack, FakeEngine(PIECES), **PREFILL)
    (decode,) = serve(stack, FakeEngine(PIECES), **DECODE)
    router = stack.enter_context(Routed(prefill, decode))
    wait_for_roles(router)
    busy(router)
    decode.engine.hold = True  # as if it waited for the KV
    answers: list[Answered] = []
    client = threading.Thread(target=lambda: answers.append(router.complete(**LONG, stream=streams)))
    client.start()
    until(lambda: prefill.engine.submits and decode.engine.submits, "both have their leg")
    assert decode.engine.loop is not None
    decode.engine.loop.call_soon_threadsafe(decode.engine.go)
    client.join(20)
    (answer,) = answers
    assert (answer.text if streams else answer.json["choices"][0]["text"]) == TEXT
    (leg,), (own,) = prefill.engine.submits, decode.engine.submits
    assert leg.limits.max_tokens == 1 and own.limits.max_tokens == 50
    assert own.awaits_kv and own.kv_peer == "tcp://127.0.0.1:7100" and leg.prompt == own.prompt
    assert router.complete(prompt="short").status == 200
    assert num_submits([prefill, decode]) == [1, 2]


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("trouble", ["refused", "dead"])
def test_a_prefill_engine_that_fails_is_not_waited_for(stack: ExitStack, streams: bool, trouble: str) -> None:
    (prefill,) = serve(stack, FakeEngine(PIECES), **PREFILL)
    (decode,) = serve(stack, FakeEngine(PIECES), **DECODE)
    router = stack.enter_context(Routed(prefill, decode))
    wait_for_roles(router)
    busy(router)
    decode.engine.hold = True  # as if it waited for the KV
    if trouble == "refused":
        prefill.engine.refuse = ("queue_full", "full")
    else:
        prefill.engine.hold = True
    answers: list[Answered] = []
    client = threading.Thread(target=lambda: answers.append(router.complete(**LONG, stream=streams)))
    client.start()
    if trouble == "dead":
        until(lambda: prefill.engine.submits and decode.engine.submits, "both have their leg")
        assert prefill.engine.loop is not None
        prefill.engine.loop.call_soon_threadsafe(prefill.abort)
    until(lambda: len(decode.engine.submits) == 2 and decode.engine.cancels, "it is asked again")
    assert [submit.awaits_kv for submit in decode.engine.submits] == [True, False]
    assert decode.engine.loop is not None
    decode.engine.loop.call_soon_threadsafe(decode.engine.go)
    client.join(20)
    (answer,) = answers
    assert router.metric("prefill_legs_failed_total") == 1
    assert (answer.text if streams else answer.json["choices"][0]["text"]) == TEXT


def test_an_engine_that_takes_no_kv_from_there_computes_itself(stack: ExitStack) -> None:
    (prefill,) = serve(stack, FakeEngine(PIECES), **PREFILL)
    (decode,) = serve(stack, FakeEngine(PIECES), **{**DECODE, "kv_peers": ("10.*",)})
    router = stack.enter_context(Routed(prefill, decode))
    wait_for_roles(router)
    busy(router)
    assert router.complete(**LONG).json["choices"][0]["text"] == TEXT
    (own,) = decode.engine.submits
    assert not own.awaits_kv and own.kv_peer == ""
