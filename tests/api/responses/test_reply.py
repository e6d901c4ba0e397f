"""Items and events in the order that clients check."""

import json
from typing import Any

import pytest
from harness import Answer, FakeEngine

from .test_endpoints import CALL, THOUGHTS, TOOLS, respond, think, without_ids


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
    texts: dict[int, str] = {}
    for event in events:
        if event["type"].endswith(".delta"):
            texts[event["output_index"]] = texts.get(event["output_index"], "") + event["delta"]
    final = [item["content"][0]["text"] if item["type"] == "message" else item["arguments"] for item in last["output"]]
    assert [texts.get(i, "") for i in range(len(final))] == final


def test_calls_are_items() -> None:
    output = respond(FakeEngine(["I look. ", CALL]), tools=[*TOOLS, {"type": "web_search"}]).json
    text, call = output["output"]
    assert text["content"][0]["text"] == "I look." and call["type"] == "function_call"
    assert (call["name"], json.loads(call["arguments"])) == ("weather", {"city": "Köln"})
    assert call["id"].startswith("fc_") and call["call_id"].startswith("call_")
    assert [tool["name"] for tool in output["tools"]] == ["weather"]  # only functions are given to the model
    one = respond(FakeEngine([CALL + CALL]), tools=TOOLS, parallel_tool_calls=False).json
    assert len(one["output"]) == 1
    none = respond(FakeEngine([CALL]), tools=TOOLS, tool_choice="none").json
    assert none["output"][0]["content"][0]["text"] == CALL


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
        "output_item.added",
        "content_part.added",
        "reasoning_text.delta",
        "reasoning_text.delta",
        "reasoning_text.done",
        "content_part.done",
        "output_item.done",
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


def test_logprobs_leave_out_the_reasoning() -> None:
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


def test_a_stream_that_fails_keeps_its_output() -> None:
    engine = FakeEngine()
    engine.fail_after = 1
    *_, last = respond(engine, stream=True).typed_events
    assert last["type"] == "response.failed" and last["response"]["status"] == "failed"
    assert last["response"]["error"] == {"code": "server_error", "message": "A worker failed."}
    assert last["response"]["output"][0]["content"][0]["text"] == "Hel"
