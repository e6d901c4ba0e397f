"""Responses: items and events in the order that clients check, the store, and what is refused by name."""

import json
from typing import Any

import pytest
from harness import Answer, Client, FakeEngine, make_app, request, run

from pagewire.api.responses.store import ResponseStore, StoredResponse
from pagewire.ipc.messages import ChatPrompt

from ..test_bad_input import COMMON

TOOLS = [{"type": "function", "name": "weather", "parameters": {"type": "object"}}]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call>'


def respond(engine: FakeEngine, **fields: Any) -> Answer:
    return request(engine, "/v1/responses", {"input": "hi", **fields})


def shown(engine: FakeEngine) -> list[dict[str, Any]]:
    """The messages of the last request."""
    prompt = engine.submits[-1].prompt
    assert isinstance(prompt, ChatPrompt)
    messages: list[dict[str, Any]] = json.loads(prompt.messages)
    return messages


def without_ids(value: Any) -> Any:
    if isinstance(value, list):
        return [without_ids(item) for item in value]
    if isinstance(value, dict):
        return {k: without_ids(v) for k, v in value.items() if k not in ("id", "item_id", "call_id")}
    return value


def test_plain() -> None:
    engine = FakeEngine()
    body = respond(engine, model="org/demo-alias", instructions="Be kind.", temperature=0.5, metadata={"a": "b"}).json
    assert body["id"].startswith("resp_") and body["object"] == "response" and body["status"] == "completed"
    assert body["model"] == "org/demo-alias" and body["instructions"] == "Be kind." and body["metadata"] == {"a": "b"}
    assert body["temperature"] == 0.5 and body["error"] is None and body["incomplete_details"] is None
    (message,) = body["output"]
    assert message.pop("id").startswith("msg_")
    assert message == {
        "type": "message",
        "status": "completed",
        "content": [{"type": "output_text", "text": "Hello", "annotations": [], "logprobs": []}],
        "role": "assistant",
    }
    assert body["usage"] == {
        "input_tokens": 3,
        "input_tokens_details": {"cached_tokens": 1, "cache_write_tokens": 0},
        "output_tokens": 5,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": 8,
    }
    assert shown(engine) == [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "hi"}]


def test_stream() -> None:
    events = respond(FakeEngine(["H", "el", "lo"]), stream=True).typed_events
    assert [event["type"].removeprefix("response.") for event in events] == [
        *("created", "in_progress", "output_item.added", "content_part.added"),
        *(
            "output_text.delta",
            "output_text.delta",
            "output_text.delta",
            "output_text.done",
            "content_part.done",
            "output_item.done",
        ),
        "completed",
    ]
    assert [event["sequence_number"] for event in events] == list(range(11))
    assert events[0]["response"]["status"] == "in_progress" and events[0]["response"]["output"] == []
    assert events[7]["text"] == "Hello" and events[9]["item"] == events[10]["response"]["output"][0]
    assert len({event["item_id"] for event in events[3:9]}) == 1
    assert [event["delta"] for event in events[4:7]] == ["H", "el", "lo"]
    assert events[4].keys() == events[5].keys() == events[6].keys() and events[5]["logprobs"] == []


@pytest.mark.parametrize("pieces", [["Let me see. ", CALL, " And", CALL], [CALL], [""], ["x"], list('a "é\n' + CALL)])
@pytest.mark.parametrize("tools", [TOOLS, []])
@pytest.mark.parametrize("finish", ["stop", "length"])
def test_a_stream_ends_with_the_plain_answer(pieces: list[str], tools: list[Any], finish: str) -> None:
    def ask(stream: bool) -> Answer:
        return respond(FakeEngine(list(pieces), finish=finish), tools=tools, stream=stream)

    plain = ask(False).json
    events = ask(True).typed_events
    last = events[-1]["response"]
    for body in (plain, last):
        body.pop("created_at"), body.pop("completed_at")
    assert without_ids(last) == without_ids(plain)
    assert events[-1]["type"] == ("response.completed" if finish == "stop" else "response.incomplete")
    assert plain["incomplete_details"] == (None if finish == "stop" else {"reason": "max_output_tokens"})
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert done == last["output"] and all(item["status"] == "completed" for item in done[:-1])
    assert done[-1]["status"] == ("completed" if finish == "stop" else "incomplete")
    grown: dict[int, str] = {}
    for event in events:
        if event["type"].endswith(".delta"):
            grown[event["output_index"]] = grown.get(event["output_index"], "") + event["delta"]
    final = [item["content"][0]["text"] if item["type"] == "message" else item["arguments"] for item in last["output"]]
    assert [grown.get(i, "") for i in range(len(final))] == final


def test_calls_are_items() -> None:
    output = respond(FakeEngine(["I look. ", CALL]), tools=[*TOOLS, {"type": "web_search"}]).json
    text, call = output["output"]
    assert text["content"][0]["text"] == "I look." and call["type"] == "function_call"
    assert (call["name"], json.loads(call["arguments"])) == ("weather", {"city": "Köln"})
    assert call["id"].startswith("fc_") and call["call_id"].startswith("call_")
    assert [tool["name"] for tool in output["tools"]] == ["weather"]  # only what the model was told of
    one = respond(FakeEngine([CALL + CALL]), tools=TOOLS, parallel_tool_calls=False).json
    assert len(one["output"]) == 1
    none = respond(FakeEngine([CALL]), tools=TOOLS, tool_choice="none").json
    assert none["output"][0]["content"][0]["text"] == CALL


THOUGHTS = ["<think>I", " see", "</think>", "Well. ", CALL]
REASONS: dict[str, Any] = {"reasoning_parser": "qwen3"}


def think(stream: bool, pieces: list[str] = THOUGHTS, **fields: Any) -> Answer:
    finish = fields.pop("finish", "stop")
    body = {"input": "hi", "stream": stream, **fields}
    return request(FakeEngine(pieces, finish=finish), "/v1/responses", body, **REASONS)


def test_reasoning_is_an_item_of_its_own() -> None:
    body = think(False, tools=TOOLS).json
    reasoning, message, call = body["output"]
    assert reasoning.pop("id").startswith("rs_")
    assert reasoning == {
        "type": "reasoning",
        "status": "completed",
        "content": [{"type": "reasoning_text", "text": "I see"}],
        "summary": [],
    }
    assert message["content"][0]["text"] == "Well." and call["name"] == "weather"
    # A piece is one step of as many tokens as it has characters, and tags count.
    assert body["usage"]["output_tokens_details"]["reasoning_tokens"] == len("<think>I see</think>")


def test_events_of_reasoning() -> None:
    events = think(True, tools=TOOLS).typed_events
    kinds = [event["type"].removeprefix("response.") for event in events]
    assert kinds[2:9] == [
        *("output_item.added", "content_part.added", "reasoning_text.delta", "reasoning_text.delta"),
        *("reasoning_text.done", "content_part.done", "output_item.done"),
    ]
    assert kinds[9:11] == ["output_item.added", "content_part.added"] and kinds[-1] == "completed"
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    added, part, *deltas, done, part_done, item_done = events[2:9]
    assert added["item"] | {"id": ""} == {
        "type": "reasoning", "id": "", "status": "in_progress", "content": [], "summary": []
    }  # fmt: skip
    assert part["part"] == {"type": "reasoning_text", "text": ""}
    assert [delta["delta"] for delta in deltas] == ["I", " see"] and done["text"] == part_done["part"][
        "text"
    ] == "I see"
    assert {event["item_id"] for event in (part, *deltas, done, part_done)} == {added["item"]["id"]}
    assert item_done["item"] == events[-1]["response"]["output"][0]
    assert [e["output_index"] for e in events if e["type"].endswith("output_item.added")] == [0, 1, 2]


@pytest.mark.parametrize("pieces", [THOUGHTS, ["<think>only"], list("<think>a</think>b"), ["a", "<think>b</think>"]])
@pytest.mark.parametrize("finish", ["stop", "length"])
def test_a_stream_of_reasoning_ends_with_the_plain_answer(pieces: list[str], finish: str) -> None:
    plain = think(False, list(pieces), tools=TOOLS, finish=finish).json
    events = think(True, list(pieces), tools=TOOLS, finish=finish).typed_events
    assert without_ids(events[-1]["response"]["output"]) == without_ids(plain["output"])
    assert events[-1]["response"]["usage"] == plain["usage"]
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert done == events[-1]["response"]["output"]


def test_log_probabilities_are_those_of_the_words_only() -> None:
    output = think(False, ["<think>ab</think>", "cd"], top_logprobs=0).json["output"]
    entries = output[1]["content"][0]["logprobs"]
    assert "".join(entry["token"] for entry in entries) == "cd"


def test_logprobs() -> None:
    for fields in ({"top_logprobs": 2}, {"include": ["message.output_text.logprobs"]}):
        events = respond(FakeEngine(), stream=True, **fields).typed_events
        deltas = [event for event in events if event["type"] == "response.output_text.delta"]
        streamed = [entry for event in deltas for entry in event["logprobs"]]
        assert [entry["token"] for entry in streamed] == list("Hello")
        entries = events[-1]["response"]["output"][0]["content"][0]["logprobs"]
        assert entries == streamed and len(entries[0]["top_logprobs"]) == fields.get("top_logprobs", 0)


def test_items_become_messages() -> None:
    engine = FakeEngine()
    items = [
        {"role": "developer", "content": "d"},
        {"role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"type": "message", "id": "msg_1", "role": "assistant", "status": "completed",
         "content": [{"type": "output_text", "text": "I look.", "annotations": []}]},
        {"type": "function_call", "id": "fc_1", "call_id": "1", "name": "weather", "arguments": "{}"},
        {"type": "function_call", "call_id": "2", "name": "weather", "arguments": '{"city": "x"}'},
        {"type": "function_call_output", "call_id": "1", "output": "sun"},
        {"type": "function_call_output", "call_id": "2", "output": [{"type": "input_text", "text": "rain"}]},
    ]  # fmt: skip
    assert respond(engine, input=items).status == 200

    def call(id: str, arguments: str) -> dict[str, Any]:
        return {"id": id, "type": "function", "function": {"name": "weather", "arguments": arguments}}

    assert shown(engine) == [
        {"role": "developer", "content": "d"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": "I look.", "reasoning_content": "hm",
         "tool_calls": [call("1", "{}"), call("2", '{"city": "x"}')]},
        {"role": "tool", "tool_call_id": "1", "content": "sun"},
        {"role": "tool", "tool_call_id": "2", "content": "rain"},
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"background": True}, "background"),
        ({"conversation": "c"}, "conversation"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"context_management": [{"type": "compaction"}]}, "context_management"),
        ({"truncation": "middle"}, "truncation"),
        ({"max_tokens": 5}, "max_tokens"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"n": 2}, "n"),
        ({"prompt_logprobs": 0}, "prompt_logprobs"),
        ({"use_beam_search": True}, "use_beam_search"),
        ({"return_tokens_as_token_ids": True}, "return_tokens_as_token_ids"),
        ({"min_tokens": 9, "max_output_tokens": 5}, "min_tokens"),
        ({"guided_json": {}, "guided_regex": "x"}, "guided_regex"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format"),
        ({"text": {"format": {"type": "grammar"}}}, "text.format"),
        ({"tool_choice": {"type": "web_search"}}, "tool_choice"),
        ({"tool_choice": {"type": "function", "name": "time"}, "tools": TOOLS}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [{"type": "function"}]}, "tools[0].name"),
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
        ({"input": [{"role": "user"}]}, "input[0].content"),
        ({"input": [{"content": "x"}]}, "input[0].role"),
        ({"input": [{"type": "function_call", "call_id": "1"}]}, "input[0].name"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].type"),
        ({"input": [{"role": "king", "content": "x"}]}, "input[0].role"),
        ({"previous_response_id": "resp_x"}, "previous_response_id"),
        ({"temperature": 9}, "temperature"),
    ],
)
def test_what_is_not_supported_is_named(fields: dict[str, Any], param: str) -> None:
    engine = FakeEngine()
    answer = respond(engine, **fields)
    assert (answer.status, answer.error["param"]) == (400, param) and not engine.submits


_OTHERWISE = ("max_tokens", "n", "response_format")


@pytest.mark.parametrize(("name", "values"), [pair for pair in COMMON if pair[0] not in _OTHERWISE])
def test_fields_that_chat_has_are_checked_alike(name: str, values: list[Any]) -> None:
    for value in values:
        engine = FakeEngine()
        answer = respond(engine, **{name: value})
        assert answer.status == 400 and answer.error["param"].startswith(name) and not engine.submits, value


def test_a_stream_that_fails_says_so_and_keeps_what_it_has() -> None:
    engine = FakeEngine()
    engine.fail_after = 1
    *_, last = respond(engine, stream=True).typed_events
    assert last["type"] == "response.failed" and last["response"]["status"] == "failed"
    assert last["response"]["error"] == {"code": "server_error", "message": "A worker failed."}
    assert last["response"]["output"][0]["content"][0]["text"] == "Hel"


def conversation(*calls: tuple[str, Any, Any, str]) -> list[Answer]:
    """Calls to one application, with keys; a body may be made from the answers so far."""

    async def scenario() -> list[Answer]:
        engine = FakeEngine([CALL])
        app = make_app(engine, api_keys=("first", "second"))
        answers: list[Answer] = []
        for method, path, body, key in calls:
            path, body = (part(answers) if callable(part) else part for part in (path, body))
            data = b"" if body is None else json.dumps(body).encode()
            headers = {"authorization": f"Bearer {key}"}
            answers.append(await Client(app).call(method, path, data, headers))
        answers[-1].engine = engine  # type: ignore[attr-defined]
        return answers

    return run(scenario())


def at(answers: list[Answer]) -> str:
    return f"/v1/responses/{answers[0].json['id']}"


def test_a_response_is_kept_for_its_owner() -> None:
    first = ("POST", "/v1/responses", {"input": "hi", "tools": TOOLS}, "first")
    made, got, foreign, deleted, gone = conversation(
        first, ("GET", at, None, "first"), ("GET", at, None, "second"), ("DELETE", at, None, "first"),
        ("GET", at, None, "first"),
    )  # fmt: skip
    assert got.json == made.json and foreign.status == 404 and gone.error["code"] == "not_found"
    assert deleted.json == {"id": made.json["id"], "object": "response.deleted", "deleted": True}


def test_a_response_goes_on_after_another() -> None:
    def after(answers: list[Answer]) -> Any:
        call_id = answers[0].json["output"][0]["call_id"]
        result = {"type": "function_call_output", "call_id": call_id, "output": "sun"}
        return {"input": [result], "previous_response_id": answers[0].json["id"], "store": False}

    first = {"input": "hi", "tools": TOOLS, "instructions": "once"}
    made, second, foreign, unkept = conversation(
        ("POST", "/v1/responses", first, "first"), ("POST", "/v1/responses", after, "first"),
        ("POST", "/v1/responses", after, "second"),
        ("GET", lambda answers: f"/v1/responses/{answers[1].json['id']}", None, "first"),
    )  # fmt: skip
    assert second.json["previous_response_id"] == made.json["id"] and second.json["store"] is False
    assert foreign.error["code"] == "previous_response_not_found" and unkept.status == 404
    messages = shown(unkept.engine)  # type: ignore[attr-defined]
    assert [message["role"] for message in messages] == ["user", "assistant", "tool"]
    assert messages[1]["tool_calls"][0]["id"] == messages[2]["tool_call_id"]


def items_at(query: str = "") -> Any:
    return lambda answers: f"{at(answers)}/input_items{query}"


def test_the_items_that_a_response_was_made_from() -> None:
    call = {"type": "function_call", "call_id": "1", "name": "weather", "arguments": "{}"}
    items = [
        {"role": "user", "content": "a"},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"role": "assistant", "content": "I look."},
        call,
        {"type": "function_call_output", "call_id": "1", "output": "sun"},
    ]
    made, whole, page, rest, foreign = conversation(
        ("POST", "/v1/responses", {"input": items, "instructions": "not of it"}, "first"),
        ("GET", items_at("?order=asc"), None, "first"),
        ("GET", items_at("?limit=2"), None, "first"),
        ("GET", lambda a: items_at(f"?limit=9&after={a[2].json['last_id']}")(a), None, "first"),
        ("GET", items_at(), None, "second"),
    )
    assert made.status == 200 and foreign.status == 404
    body = whole.json
    assert body["object"] == "list" and not body["has_more"]
    assert (body["first_id"], body["last_id"]) == (body["data"][0]["id"], body["data"][-1]["id"])
    status: dict[str, Any] = {"status": "completed"}
    assert without_ids(body["data"]) == [
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "a"}], **status},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}], **status},
        {"type": "message", "role": "assistant", **status,
         "content": [{"type": "output_text", "text": "I look.", "annotations": [], "logprobs": []}]},
        {"type": "function_call", "name": "weather", "arguments": "{}", **status},
        {"type": "function_call_output", "output": "sun", **status},
    ]  # fmt: skip
    assert page.json["has_more"] and page.json["data"] + rest.json["data"] == body["data"][::-1]


@pytest.mark.parametrize(
    "query", ["?limit=0", "?limit=101", "?limit=x", "?order=up", "?after=msg_x", "?limit=-1", "?limit=01" + "0" * 5000]
)
def test_pages_that_there_are_not(query: str) -> None:
    _, answer = conversation(
        ("POST", "/v1/responses", {"input": "x"}, "first"), ("GET", items_at(query), None, "first")
    )
    assert answer.status == 400 and answer.error["param"] == query[1:].split("=")[0]


def test_the_store_has_a_bound() -> None:
    store = ResponseStore(max_bytes=10_000)
    for i in range(100):
        store.put(b"", f"r{i}", StoredResponse(b"x" * 1000, b"y" * 1000))
        assert store.num_bytes <= 10_000
        store.get(b"", "r0")  # what is used stays
    kept = [i for i in range(100) if store.get(b"", f"r{i}") is not None]
    assert kept == [0, 98, 99]
    store.put(b"", "large", StoredResponse(b"x" * 20_000, b""))
    assert store.get(b"", "large") is None and store.get(b"", "r0") is not None
    assert store.delete(b"", "r0") and not store.delete(b"", "r0")
    for i in (98, 99):
        store.delete(b"", f"r{i}")
    assert store.num_bytes == 0


@pytest.mark.parametrize("truncation", [None, "auto", "disabled"])
def test_truncation_is_repeated_and_drops_nothing(truncation: str | None) -> None:
    engine = FakeEngine()
    assert respond(engine, truncation=truncation).json["truncation"] == (truncation or "disabled")
    assert engine.submits[0].truncate is None
    engine.refuse = ("context_length_exceeded", "This model's maximum context length is 128 tokens. However, it …")
    answer = respond(engine, truncation=truncation)
    assert (answer.status, answer.error["code"]) == (400, "context_length_exceeded")
    assert answer.error["message"].startswith("This model's maximum context length is")


def test_an_effort_of_none_stops_the_reasoning() -> None:
    engine = FakeEngine()
    assert respond(engine, reasoning={"effort": "none"}).status == 200
    variables = json.loads(engine.submits[0].prompt.template_kwargs)  # type: ignore[union-attr]
    assert variables == {"reasoning_effort": "none", "enable_thinking": False, "thinking": False}


def test_a_schema_that_is_refused_has_the_name_of_its_field() -> None:
    """Tools that the server would run are no functions, but have their places among the tools."""
    engine = FakeEngine()
    fields: dict[str, Any] = {"tools": [{"type": "web_search"}, *TOOLS], "tool_choice": "required"}
    field = "tools[0].function.parameters"
    engine.refuse = ("invalid_request", f"The JSON schema in {field} (of 'x') cannot be enforced: no.", field, 0)
    answer = respond(engine, **fields)
    assert (answer.status, answer.error["param"]) == (400, "tools[1].parameters")
    assert answer.error["message"] == "The JSON schema in tools[1].parameters (of 'x') cannot be enforced: no."
    field = "response_format.json_schema.schema"
    engine.refuse = ("invalid_request", f"The JSON schema in {field} cannot be enforced: no.", field, 0)
    format = {"type": "json_schema", "name": "n", "schema": {"not": {}}}
    assert respond(engine, text={"format": format}).error["param"] == "text.format.schema"
    fields["tools"][1] = {**TOOLS[0], "name": "a b"}
    assert respond(FakeEngine(), **fields).error["param"] == "tools[1].name"
