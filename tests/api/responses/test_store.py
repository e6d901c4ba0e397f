"""Stored responses: their owners, later servers, and the order of items."""

import asyncio
import json
import threading
from pathlib import Path
from typing import Any

import pytest
from harness import Answer, Client, FakeEngine, make_app, run

from pagewire.api.responses.store import ResponseStore, StoredResponse
from pagewire.api.state.database import Database

from .test_endpoints import TOOLS, conversation, items_path, last_messages, response_path, without_ids


def test_a_response_is_stored_for_its_owner() -> None:
    first = ("POST", "/v1/responses", {"input": "hi", "tools": TOOLS}, "first")
    created, got, foreign, deleted, missing = conversation(
        first, ("GET", response_path, None, "first"), ("GET", response_path, None, "second"),
        ("DELETE", response_path, None, "first"),
        ("GET", response_path, None, "first"),
    )  # fmt: skip
    assert got.json == created.json and foreign.status == 404 and missing.error["code"] == "not_found"
    assert deleted.json == {"id": created.json["id"], "object": "response.deleted", "deleted": True}


def test_a_response_continues_a_previous_one() -> None:
    def after(answers: list[Answer]) -> Any:
        call_id = answers[0].json["output"][0]["call_id"]
        result = {"type": "function_call_output", "call_id": call_id, "output": "sun"}
        return {"input": [result], "previous_response_id": answers[0].json["id"], "store": False}

    first = {"input": "hi", "tools": TOOLS, "instructions": "once"}
    created, second, foreign, unstored = conversation(
        ("POST", "/v1/responses", first, "first"), ("POST", "/v1/responses", after, "first"),
        ("POST", "/v1/responses", after, "second"),
        ("GET", lambda answers: f"/v1/responses/{answers[1].json['id']}", None, "first"),
    )  # fmt: skip
    assert second.json["previous_response_id"] == created.json["id"] and second.json["store"] is False
    assert foreign.error["code"] == "previous_response_not_found" and unstored.status == 404
    messages = last_messages(unstored.engine)  # type: ignore[attr-defined]
    assert [message["role"] for message in messages] == ["user", "assistant", "tool"]
    assert messages[1]["tool_calls"][0]["id"] == messages[2]["tool_call_id"]


def test_input_items_are_listed_in_pages() -> None:
    call = {"type": "function_call", "call_id": "1", "name": "weather", "arguments": "{}"}
    items = [
        {"role": "user", "content": "a"},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"role": "assistant", "content": "I look."},
        call,
        {"type": "function_call_output", "call_id": "1", "output": "sun"},
    ]
    created, whole, page, rest, foreign = conversation(
        ("POST", "/v1/responses", {"input": items, "instructions": "not of it"}, "first"),
        ("GET", items_path("?order=asc"), None, "first"),
        ("GET", items_path("?limit=2"), None, "first"),
        ("GET", lambda a: items_path(f"?limit=9&after={a[2].json['last_id']}")(a), None, "first"),
        ("GET", items_path(), None, "second"),
    )
    assert created.status == 200 and foreign.status == 404
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
def test_invalid_page_parameters_are_refused(query: str) -> None:
    _, answer = conversation(
        ("POST", "/v1/responses", {"input": "x"}, "first"), ("GET", items_path(query), None, "first")
    )
    assert answer.status == 400 and answer.error["param"] == query[1:].split("=")[0]


def test_a_response_outlives_its_server(tmp_path: Path) -> None:
    """And another api process continues it."""
    file = str(tmp_path / "state")
    (created,) = conversation(("POST", "/v1/responses", {"input": "hi"}, "first"), state=file)
    id = created.json["id"]
    got, second, foreign = conversation(
        ("GET", f"/v1/responses/{id}", None, "first"),
        ("POST", "/v1/responses", {"input": "go on", "previous_response_id": id}, "first"),
        ("GET", f"/v1/responses/{id}", None, "second"),
        state=file,
    )
    assert got.json == created.json and second.status == 200 and foreign.status == 404


def test_a_stored_response_is_there_when_its_stream_ends(tmp_path: Path) -> None:
    found: list[StoredResponse | None] = []
    other = ResponseStore(Database(str(tmp_path / "state")))

    def look(part: bytes) -> None:
        if b"response.completed" in part:
            id = json.loads(part.partition(b"data: ")[2])["response"]["id"]
            found.append(asyncio.run(other.get(b"", id)))

    def in_thread(part: bytes) -> None:
        thread = threading.Thread(target=look, args=(part,))
        thread.start()
        thread.join()

    async def work() -> None:
        client = Client(make_app(FakeEngine(), state=str(tmp_path / "state")))
        client.on_part = in_thread
        await client.call("POST", "/v1/responses", json.dumps({"input": "hi", "stream": True}).encode())

    run(work())
    assert [response is not None for response in found] == [True]


def test_a_file_that_cannot_be_used_costs_nothing_but_the_storing(tmp_path: Path) -> None:
    (tmp_path / "state").write_text("not a database\n" * 100)
    created, got, second, other = conversation(
        ("POST", "/v1/responses", {"input": "hi"}, "first"),
        ("GET", response_path, None, "first"),
        ("POST", "/v1/responses", {"input": "hi", "previous_response_id": "resp_1"}, "first"),
        ("POST", "/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}, "first"),
        state=str(tmp_path / "state"),
    )
    assert created.status == 200 and other.status == 200
    assert got.status == second.status == 503 and got.error["code"] == "state_unavailable"
