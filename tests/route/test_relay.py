"""Requests through a router: where they go, what is tried again, and what comes back."""

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

from .routed import Answered, Behind, MortalEngine, Routed

PIECES = ["Hel", "lo ", "wor", "ld, ", "ag", "ain"]
TEXT = "".join(PIECES)
STREAM: dict[str, Any] = {"stream": True, "max_tokens": 50}


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def behind(stack: ExitStack, *engines: FakeEngine, **config: Any) -> list[Behind]:
    return [stack.enter_context(Behind(engine, **config)) for engine in engines]


def num_asked(engines: list[Behind]) -> list[int]:
    return [len(engine.engine.submits) for engine in engines]


def test_everything_is_passed_through(stack: ExitStack) -> None:
    engines = behind(stack, FakeEngine(PIECES))
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


def test_what_is_no_request_is_the_engine_s_to_refuse(stack: ExitStack) -> None:
    engines = behind(stack, FakeEngine(PIECES))
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
        b'{"prompt": "x", "stream": 1}',
        b'{"prompt": "x", "n": 1e30, %b}' % stream,
        b"[]",
        b"\xff",
        b"",
        b'{"\xff": 1, "prompt": "x", %b}' % stream,
    ):
        assert router.ask("/v1/completions", body).status == 400, body


@pytest.mark.parametrize(("return_token_ids", "logprobs"), [(False, None), (False, 2), (True, 0)])
def test_a_stream_is_what_it_is_without_a_router(
    stack: ExitStack, return_token_ids: bool, logprobs: int | None
) -> None:
    engine = FakeEngine(PIECES)
    (served,) = behind(stack, engine)
    router = stack.enter_context(Routed(served))
    body = {"prompt": "abc", **STREAM, "return_token_ids": return_token_ids, "logprobs": logprobs, "seed": 5, "n": 2}
    body["stream_options"] = {"include_usage": True}
    found = []
    for url in (router.url, served.address):
        router.url = url
        events = router.ask("/v1/completions", body).events
        found.append([{**event, "id": 0, "created": 0} for event in events[:-1]] + events[-1:])
    assert found[0] == found[1]


def test_a_stream_draws_with_a_seed_that_can_be_repeated(stack: ExitStack) -> None:
    (served,) = engines = behind(stack, FakeEngine(PIECES))
    router = stack.enter_context(Routed(*engines))
    assert router.complete(**STREAM).text == router.complete(**STREAM, seed=9).text == TEXT
    assert router.complete(**STREAM, prompt=["a", "b"], temperature=1).events[-1] == "[DONE]"
    first, second, *several = served.engine.submits
    assert first.text.prompt and first.sampling.seed != second.sampling.seed == 9
    assert len({order.sampling.seed for order in several}) == 2, "two prompts draw on their own"


@pytest.mark.parametrize(
    "encodings", [(b"identity", b"chunked"), (b"chunked", b"chunked"), (b"gzip, chunked",), (b"x",)]
)
def test_a_body_of_unclear_length_is_refused(stack: ExitStack, encodings: tuple[bytes, ...]) -> None:
    (engine,) = behind(stack, FakeEngine(PIECES))
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


def test_load_is_shared_out(stack: ExitStack) -> None:
    engines = behind(stack, FakeEngine(PIECES), FakeEngine(PIECES))
    router = stack.enter_context(Routed(*engines))
    for i in range(6):
        assert router.complete(prompt=f"{i}").status == 200
    assert num_asked(engines) == [3, 3]


def test_a_prompt_goes_where_its_beginning_is(stack: ExitStack) -> None:
    engines = behind(stack, FakeEngine(PIECES), FakeEngine(PIECES))
    router = stack.enter_context(Routed(*engines))
    system = "You are a router's test. " * 60
    for i in range(5):
        assert router.complete(prompt=f"{system}{i}", truncate_prompt_tokens=5).status == 200
    assert sorted(num_asked(engines)) == [0, 5]
    assert router.metric("prefix_blocks_met_total") == 4 * (len(system) // 256)


def test_an_engine_that_is_much_busier_gets_nothing_for_its_beginnings(stack: ExitStack) -> None:
    engines = behind(stack, FakeEngine(PIECES), FakeEngine(PIECES), max_queued_requests=100)
    router = stack.enter_context(Routed(*engines))
    for engine in engines:
        engine.engine.hold = True
    threads = [
        threading.Thread(target=router.complete, kwargs={"prompt": "x" * 2000, "truncate_prompt_tokens": 5})
        for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    until(lambda: sum(num_asked(engines)) == 8, "all eight are asked for")
    assert min(num_asked(engines)) >= 2, "eight at once are too many for one of two"
    for engine in engines:
        engine.engine.hold = False
        assert engine.engine.loop is not None
        engine.engine.loop.call_soon_threadsafe(engine.engine.go)
    for thread in threads:
        thread.join(10)


def test_what_has_no_byte_yet_is_sent_again(stack: ExitStack) -> None:
    first = MortalEngine(PIECES, dies_at=0)
    engines = behind(stack, first, FakeEngine(PIECES))
    router = stack.enter_context(Routed(*engines))
    answers = [router.complete(prompt=f"{i}", max_tokens=50) for i in range(4)]
    assert [answer.json["choices"][0]["text"] for answer in answers] == [TEXT] * 4
    assert num_asked(engines) == [1, 4] and router.metric("retries_total") == 1
    assert [state["ready"] for state in router.ask("/health").json["engines"]] == [False, True]


@pytest.mark.parametrize(
    ("dies_at", "fields"),
    [(1, {}), (5, {"n": 3}), (3, {"return_token_ids": True, "logprobs": 1}), (2, {"echo": True, "logprobs": 0})],
)
def test_a_stream_goes_on_where_it_was(stack: ExitStack, dies_at: int, fields: dict[str, Any]) -> None:
    healthy = FakeEngine(PIECES)
    engines = behind(stack, MortalEngine(PIECES, dies_at=dies_at), healthy)
    router = stack.enter_context(Routed(*engines))
    broken = router.complete(**STREAM, **fields, stream_options={"include_usage": True})
    undisturbed = router.complete(**STREAM, **fields, stream_options={"include_usage": True})
    assert num_asked(engines)[0] == 1 and router.metric("resumes_total") == 1
    assert healthy.submits[0].sampling.seed == engines[0].engine.submits[0].sampling.seed
    assert len({event["id"] for event in broken.events[:-1]}) == 1
    assert told(broken.events) == told(undisturbed.events)


def told(events: list[Any]) -> dict[Any, Any]:
    """Everything that a stream says, put together by choice."""
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
    """Of a stream of typed events that ended well, with the last of them checked."""
    *blocks, rest = answer.body.decode().split("\n\n")
    assert rest == "" and all(block.startswith("event: ") for block in blocks), "the router's comments are its own"
    events = [json.loads(block.partition("data: ")[2]) for block in blocks]
    assert events[-1]["type"] in ("message_stop", "response.completed"), events[-1]
    assert len({event["message"]["id"] for event in events if "message" in event}) in (0, 1)
    deltas = [event["delta"] for event in events if event["type"].endswith(("text.delta", "block_delta"))]
    return "".join(delta if isinstance(delta, str) else delta["text"] for delta in deltas)


@pytest.mark.parametrize("path", TYPED)
@pytest.mark.parametrize("dies_at", [0, 1, 3, 5])
def test_a_stream_of_typed_events_goes_on_where_it_was(stack: ExitStack, path: str, dies_at: int) -> None:
    healthy = FakeEngine(PIECES)
    engines = behind(stack, MortalEngine(PIECES, dies_at=dies_at), healthy)
    router = stack.enter_context(Routed(*engines))
    assert [typed_text(router.ask(path, TYPED[path])) for _ in range(2)] == [TEXT] * 2
    assert num_asked(engines)[0] == 1 and router.metric("resumes_total") == 1
    assert healthy.submits[0].sampling.seed == engines[0].engine.submits[0].sampling.seed
    assert bool(healthy.submits[0].resume_ids) == (dies_at > 1), "tokens of the last event are drawn again"


def test_a_response_that_another_engine_went_on_with_is_kept_there(stack: ExitStack) -> None:
    engines = behind(stack, MortalEngine(PIECES, dies_at=3), FakeEngine(PIECES))
    router = stack.enter_context(Routed(*engines))
    stream = router.ask("/v1/responses", TYPED["/v1/responses"]).body.decode()
    ids = set(re.findall(r'"id":"(resp_[^"]+)"', stream))
    assert len(ids) == 1
    (id,) = ids
    kept = router.ask(f"/v1/responses/{id}").json
    assert (kept["id"], kept["output"][0]["content"][0]["text"]) == (id, TEXT)
    assert f'"item_id":"{kept["output"][0]["id"]}"' in stream
    assert router.ask("/v1/responses", {"input": "more", "previous_response_id": id}).status == 200


@pytest.mark.parametrize("path", ["/v1/completions", *TYPED])
def test_an_engine_that_is_shutting_down_loses_no_stream(stack: ExitStack, path: str) -> None:
    leaving = FakeEngine(PIECES)
    engines = behind(stack, leaving, FakeEngine(PIECES))
    router = stack.enter_context(Routed(*engines))
    leaving.hold = True
    texts: list[str] = []

    def stream() -> None:
        texts.append(typed_text(router.ask(path, TYPED[path])) if path in TYPED else router.complete(**STREAM).text)

    thread = threading.Thread(target=stream)
    thread.start()
    until(lambda: leaving.submits, "the engine has it")
    assert leaving.loop is not None
    leaving.loop.call_soon_threadsafe(leaving.gateway.close, "The server is shutting down.")
    thread.join(10)
    assert texts == [TEXT]
    router.wait_ready(1)
    assert [router.complete(prompt=f"{i}").status for i in range(3)] == [200] * 3
    assert num_asked(engines) == [1, 4]


def test_a_full_engine_s_requests_go_to_another_and_a_full_fleet_says_so(stack: ExitStack) -> None:
    full, free = FakeEngine(PIECES), FakeEngine(PIECES)
    full.refuse = ("queue_full", "The queue is full.")
    engines = behind(stack, full, free)
    router = stack.enter_context(Routed(*engines))
    assert [router.complete(prompt=f"{i}").status for i in range(3)] == [200] * 3
    free.refuse = full.refuse
    answer = router.complete()
    assert (answer.status, answer.code) == (429, "queue_full") and answer.headers["retry-after"]


def test_an_engine_s_own_errors_are_not_tried_again(stack: ExitStack) -> None:
    engine = FakeEngine(PIECES)
    engine.fail_after = 2
    engines = behind(stack, engine, FakeEngine(PIECES))
    router = stack.enter_context(Routed(*engines))
    answers = [router.complete(prompt=f"{i}").status for i in range(2)]
    assert sorted(answers) == [200, 500] and num_asked(engines) == [1, 1]
    ends = [router.complete(prompt=f"{i}", **STREAM).events[-1] for i in range(2)]
    assert sum(end != "[DONE]" and "error" in end for end in ends) == 1


def test_a_request_that_engines_die_of_is_given_up(stack: ExitStack) -> None:
    engines = behind(stack, *(MortalEngine(PIECES, dies_at=2) for _ in range(2)), MortalEngine(PIECES, dies_at=2))
    router = stack.enter_context(Routed(*engines))
    *_, last = router.complete(**STREAM, temperature=0).events
    assert last["error"]["code"] == "engine_unavailable" and "not tried again" in last["error"]["message"]
    assert sorted(num_asked(engines)) == [1, 1, 1], "the first of them had said something new"
    assert router.metric('failures_total{reason="fruitless"}') == 1


@pytest.mark.parametrize("fields", [{}, STREAM])
def test_a_request_that_engines_fail_of_is_given_up(stack: ExitStack, fields: dict[str, Any]) -> None:
    """As above, but the engines have the time to say that they have failed for good."""
    mortal = [MortalEngine(PIECES, dies_at=0) for _ in range(3)]
    engines = behind(stack, *mortal)
    for engine in mortal:
        engine.on_death = partial(engine.gateway.close, "The engine has failed.", has_failed=True)
    router = stack.enter_context(Routed(*engines))
    answer = router.complete(**fields, temperature=0)
    error = answer.json["error"] if not fields else answer.events[-1]["error"]
    assert error["code"] == "engine_unavailable" and "2 engines were lost" in error["message"]
    assert sorted(num_asked(engines)) == [0, 1, 1]


class Forgetful(FakeEngine):
    """Has never heard of resume_token_ids, and draws everything again."""

    def post(self, message: Any) -> None:
        is_order = isinstance(message, Submit)
        super().post(replace(message, resume_ids=b"", resume_chars=0) if is_order else message)


def test_an_engine_that_resumes_nothing_goes_on_all_the_same(stack: ExitStack) -> None:
    engines = behind(stack, MortalEngine(PIECES, dies_at=3), Forgetful(PIECES))
    router = stack.enter_context(Routed(*engines))
    assert router.complete(**STREAM).text == TEXT


def test_an_engine_that_answers_something_else_does_not_go_on(stack: ExitStack) -> None:
    engines = behind(stack, MortalEngine(PIECES, dies_at=3), Forgetful(["Something", " else"]))
    router = stack.enter_context(Routed(*engines))
    *_, last = router.complete(**STREAM).events
    assert "sampled other tokens" in last["error"]["message"]


def test_without_an_engine_requests_wait_and_then_hear_of_it(stack: ExitStack) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    router = stack.enter_context(Routed(f"http://127.0.0.1:{port}", wait=False, outage_wait=0.2))
    answer = router.complete()
    assert (answer.status, answer.code) == (503, "engine_unavailable") and answer.headers["retry-after"]
    assert router.ask("/ready").status == 503 and router.ask("/health").json["status"] == "no engine"


def test_a_request_that_waits_is_served_when_the_engine_is_back(stack: ExitStack) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    router = stack.enter_context(Routed(f"http://127.0.0.1:{port}", wait=False))
    texts: list[str] = []
    thread = threading.Thread(target=lambda: texts.append(router.complete(**STREAM).text))
    thread.start()
    until(lambda: router.metric("open_requests"), "it waits")
    listener = socket.create_server(("127.0.0.1", port))
    stack.enter_context(Behind(FakeEngine(PIECES), listener))
    thread.join(10)
    assert texts == [TEXT]


def test_a_client_that_leaves_is_forgotten_everywhere(stack: ExitStack) -> None:
    engine = FakeEngine(PIECES)
    engine.hold = True
    engines = behind(stack, engine)
    router = stack.enter_context(Routed(*engines))
    body = json.dumps({"prompt": "abc", **STREAM}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(body)}\r\n"
    head += "content-type: application/json\r\n"
    port = int(router.url.rpartition(":")[2])
    with socket.create_connection(("127.0.0.1", port)) as client:
        client.sendall(head.encode() + b"\r\n" + body)
        until(lambda: engine.open, "the engine has it")
    until(lambda: not engine.open and not router.metric("open_requests"), "it is forgotten")
    assert engine.cancels


def test_stored_responses_are_where_they_were_made(stack: ExitStack) -> None:
    engines = behind(stack, FakeEngine(PIECES), FakeEngine(PIECES))
    router = stack.enter_context(Routed(*engines))
    ids = [router.ask("/v1/responses", {"input": f"{i}"}).json["id"] for i in range(4)]
    assert [router.ask(f"/v1/responses/{id}").json["id"] for id in ids] == ids
    for id in ids:
        answer = router.ask("/v1/responses", {"input": "more", "previous_response_id": id})
        assert answer.status == 200, answer.body
    assert router.ask("/v1/responses/resp_unknown").status == 404


def test_limits_of_a_key(stack: ExitStack) -> None:
    engine = FakeEngine(PIECES)
    engine.hold = True
    engines = behind(stack, engine, api_keys=("a", "b"))
    router = stack.enter_context(Routed(*engines, api_keys=("a", "b"), max_open_requests=1))
    assert router.complete().status == 401
    first = threading.Thread(target=router.ask, args=("/v1/completions", {"prompt": "x"}), kwargs={"x_api_key": "a"})
    first.start()
    until(lambda: engine.submits, "the engine has it")
    refused = router.ask("/v1/completions", {"prompt": "x"}, x_api_key="a")
    assert (refused.status, refused.code) == (429, "rate_limit_exceeded")
    assert engine.loop is not None
    engine.loop.call_soon_threadsafe(engine.go)
    assert router.ask("/v1/completions", {"prompt": "x"}, x_api_key="b").status == 200
    first.join(10)
    assert router.ask("/v1/completions", {"prompt": "x"}, x_api_key="a").status == 200


def test_engines_come_and_go_by_an_administrator_s_word(stack: ExitStack) -> None:
    engines = behind(stack, FakeEngine(PIECES), FakeEngine(PIECES))
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
    assert num_asked(engines) == [0, 3]
    assert router.ask("/admin/engines", {"remove": engines[0].address}, **bearer).status == 404


def test_without_an_admin_key_there_is_no_administrator(stack: ExitStack) -> None:
    engines = behind(stack, FakeEngine(PIECES))
    router = stack.enter_context(Routed(*engines))
    assert router.ask("/admin/engines").status == 404
    assert router.ask("/admin/sleep", {}).status == 404


def test_a_router_that_stops_says_so_and_ends_streams_in_good_form(stack: ExitStack) -> None:
    engine = FakeEngine(PIECES)
    engine.hold = True
    engines = behind(stack, engine)
    with Routed(*engines) as router:
        answers: list[Any] = []
        thread = threading.Thread(target=lambda: answers.append(router.complete(**STREAM)))
        thread.start()
        until(lambda: engine.open, "the engine has it")
    thread.join(10)
    assert answers[0].status == 200 and answers[0].events[-1]["error"]["code"] == "shutting_down"
