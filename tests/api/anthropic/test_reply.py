"""Blocks and events of a message."""

import json
from typing import Any

import pytest
from harness import FakeEngine

from .test_endpoints import CALL, TOOLS, ask, think


@pytest.mark.parametrize("pieces", [["Let me see. ", CALL, " And", CALL], [CALL], [""], ["x"], list('a "é\n' + CALL)])
@pytest.mark.parametrize("tools", [TOOLS, []])
@pytest.mark.parametrize("finish", ["stop", "length"])
def test_a_stream_adds_up_to_the_plain_answer(pieces: list[str], tools: list[Any], finish: str) -> None:
    plain = ask(FakeEngine(list(pieces), finish=finish), tools=tools).json
    blocks: list[dict[str, Any]] = []
    *events, delta, _ = ask(FakeEngine(list(pieces), finish=finish), tools=tools, stream=True).typed_events
    for event in events[1:]:
        if event["type"] == "content_block_start":
            assert event["index"] == len(blocks)
            blocks.append(event["content_block"] | {"json": ""})
        elif event["type"] == "content_block_delta" and event["delta"]["type"] == "text_delta":
            blocks[event["index"]]["text"] += event["delta"]["text"]
        elif event["type"] == "content_block_delta":
            blocks[event["index"]]["json"] += event["delta"]["partial_json"]
    for block in (*blocks, *plain["content"]):
        block.pop("id", None)
        if data := block.pop("json", None):
            block["input"] = json.loads(data)
    assert blocks == plain["content"] and delta["usage"] == plain["usage"]
    assert delta["delta"]["stop_reason"] == plain["stop_reason"]
    has_calls = any(block["type"] == "tool_use" for block in blocks)
    assert plain["stop_reason"] == ("max_tokens" if finish == "length" else "tool_use" if has_calls else "end_turn")


def test_reasoning_is_a_block_of_its_own() -> None:
    thinking, text, call = think(False).json["content"]
    assert thinking == {"type": "thinking", "thinking": "I see", "signature": ""}
    assert text["text"] == "Well." and call["name"] == "weather"


def test_events_of_reasoning() -> None:
    events = think(True).typed_events
    assert events[1]["content_block"] == {"type": "thinking", "thinking": "", "signature": ""}
    assert [event["delta"] for event in events[2:5]] == [
        {"type": "thinking_delta", "thinking": "I"},
        {"type": "thinking_delta", "thinking": " see"},
        {"type": "signature_delta", "signature": ""},
    ]
    assert events[5]["type"] == "content_block_stop" and [event["index"] for event in events[1:6]] == [0] * 5
    assert events[6]["content_block"]["type"] == "text" and events[6]["index"] == 1
    assert events[-2]["delta"]["stop_reason"] == "tool_use"


@pytest.mark.parametrize("pieces", [["<think>only"], list("<think>a</think>b"), ["a", "<think>b</think>"]])
def test_a_stream_of_reasoning_adds_up_to_the_plain_answer(pieces: list[str]) -> None:
    plain = [block.get("thinking", block.get("text")) for block in think(False, list(pieces)).json["content"]]
    texts: dict[int, str] = {}
    for event in think(True, list(pieces)).typed_events:
        if event["type"] == "content_block_delta":
            piece = event["delta"].get("thinking", event["delta"].get("text", ""))
            texts[event["index"]] = texts.get(event["index"], "") + piece
    assert [texts[i] for i in range(len(texts))] == plain


def test_a_stop_sequence_is_named() -> None:
    body = ask(FakeEngine(stop_reason="END"), stop_sequences=["END"]).json
    assert (body["stop_reason"], body["stop_sequence"]) == ("stop_sequence", "END")


def test_a_truncated_call_has_an_empty_input() -> None:
    engine = FakeEngine([CALL[:55]], finish="length")
    (block,) = ask(engine, tools=TOOLS).json["content"]
    assert (block["name"], block["input"]) == ("weather", {})


def test_a_stream_that_fails_ends_with_an_error() -> None:
    engine = FakeEngine()
    engine.fail_after = 1
    *_, last = ask(engine, stream=True).typed_events
    assert last == {"type": "error", "error": {"type": "api_error", "message": "A worker failed."}}
