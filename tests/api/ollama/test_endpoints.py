"""Ollama's API over the whole application: shapes of answers and streams, models, and errors."""

import asyncio
import json
from collections.abc import AsyncGenerator
from typing import Any

import pytest
from harness import Answer, Client, FakeEngine, make_app, request, run

from pagewire.api.ollama.types import Progress
from pagewire.config.access import ApiKey

CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call>'
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
HI = {"model": "demo", "messages": [{"role": "user", "content": "hi"}]}


def lines(answer: Answer) -> list[dict[str, Any]]:
    assert answer.status == 200 and answer.headers["content-type"] == "application/x-ndjson"
    *found, rest = answer.body.decode().split("\n")
    assert rest == ""
    return [json.loads(line) for line in found]


def chat(engine: FakeEngine, **fields: Any) -> Answer:
    return request(engine, "/api/chat", {**HI, **fields})


def test_an_answer_is_streamed_unless_the_client_says_otherwise() -> None:
    *parts, last = lines(chat(FakeEngine(["Hel", "lo"])))
    assert [part["message"] for part in parts] == [
        {"role": "assistant", "content": "Hel"},
        {"role": "assistant", "content": "lo"},
    ]
    assert all(part["model"] == "demo" and part["done"] is False and part["created_at"][-1] == "Z" for part in parts)
    assert last["done"] is True and last["done_reason"] == "stop" and last["message"]["content"] == ""
    counts = {name: last[name] for name in ("prompt_eval_count", "eval_count", "load_duration")}
    assert counts == {"prompt_eval_count": 3, "eval_count": 5, "load_duration": 0}
    assert last["total_duration"] >= 0 and last["eval_duration"] >= 0
    whole = chat(FakeEngine(["Hel", "lo"]), stream=False).json
    assert whole["message"] == {"role": "assistant", "content": "Hello"} and whole["done"] is True
    assert whole.keys() == last.keys()


def test_generate_gives_a_text() -> None:
    fields = {"model": "demo", "prompt": "hi"}
    *parts, last = lines(request(FakeEngine(["Hel", "lo"]), "/api/generate", fields))
    assert [part["response"] for part in parts] == ["Hel", "lo"] and last["response"] == "" and "message" not in last
    whole = request(FakeEngine(["Hel", "lo"], finish="length"), "/api/generate", {**fields, "stream": False}).json
    assert whole["response"] == "Hello" and whole["done_reason"] == "length"


def test_a_tool_call_is_one_object() -> None:
    pieces = ["I look. ", *(CALL[i : i + 7] for i in range(0, len(CALL), 7))]
    *parts, last = lines(chat(FakeEngine(pieces), tools=[TOOL]))
    calls = [call for part in parts for call in part["message"].get("tool_calls", [])]
    assert [call["function"] for call in calls] == [{"index": 0, "name": "weather", "arguments": {"city": "Köln"}}]
    assert "".join(part["message"]["content"] for part in parts).strip() == "I look."
    assert "tool_calls" not in last["message"] and last["done_reason"] == "stop"
    whole = chat(FakeEngine(pieces), tools=[{"function": TOOL["function"]}], stream=False).json["message"]
    assert [call["function"] for call in whole["tool_calls"]] == [calls[0]["function"]]


def test_reasoning_is_thinking() -> None:
    engine = FakeEngine(["<think>", "hm", "</think>", "yes"])
    parts = lines(request(engine, "/api/chat", {**HI, "think": True}, reasoning_parser="qwen3"))
    assert "".join(part["message"].get("thinking", "") for part in parts) == "hm"
    assert "".join(part["message"]["content"] for part in parts) == "yes"
    refused = chat(FakeEngine(), think=True)
    assert refused.status == 400 and "does not support thinking" in refused.json["error"]
    assert chat(FakeEngine(), think=False).status == 200


def test_log_probabilities() -> None:
    parts = lines(chat(FakeEngine(["a", "b"]), logprobs=True, top_logprobs=2))
    found = [one for part in parts for one in part.get("logprobs", [])]
    assert [one["token"] for one in found] == ["a", "b"] and all(len(one["top_logprobs"]) == 2 for one in found)


def test_errors_are_texts() -> None:
    missing = request(FakeEngine(), "/api/chat", {**HI, "model": "other"})
    assert missing.status == 404 and missing.json == {"error": "model 'other' not found"}
    assert isinstance(request(FakeEngine(), "/api/copy", {}).json["error"], str)
    bad = chat(FakeEngine(), options={"temperature": 9})
    assert bad.status == 400 and bad.json["error"].startswith("options.temperature")
    engine = FakeEngine(["a", "b"])
    engine.fail_after = 1
    last = lines(chat(engine))[-1]
    assert isinstance(last["error"], str)


def test_a_model_is_found_with_and_without_its_tag() -> None:
    for name in ("demo", "demo:latest", "org/demo-alias"):
        assert chat(FakeEngine(), model=name, stream=False).json["model"] == name


def test_a_request_without_a_question_loads_the_model() -> None:
    loaded = chat(FakeEngine(), messages=[], stream=False).json
    assert loaded["done"] is True and loaded["done_reason"] == "load" and loaded["message"]["content"] == ""
    (line,) = lines(request(FakeEngine(), "/api/generate", {"model": "demo", "keep_alive": 0}))
    assert line["done_reason"] == "unload" and line["response"] == ""


def test_models_are_listed_and_shown() -> None:
    engine = FakeEngine()
    tags = request(engine, "/api/tags", method="GET").json["models"]
    assert [tag["name"] for tag in tags] == ["demo", "org/demo-alias"] and tags[0].keys() >= {"model", "digest", "size"}
    (loaded, _) = request(engine, "/api/ps", method="GET").json["models"]
    assert loaded["context_length"] == 128 and loaded["size_vram"] == 0
    shown = request(engine, "/api/show", {"name": "demo"}).json
    assert shown["capabilities"] == ["completion", "tools", "embedding"]
    architecture = shown["model_info"]["general.architecture"]
    assert shown["model_info"][f"{architecture}.context_length"] == 128
    assert request(engine, "/api/show", {"model": "other"}).status == 404
    assert request(engine, "/api/version", method="GET").json["version"].count(".") == 2


def test_a_served_model_is_there_and_no_other_is_downloaded() -> None:
    states = lines(request(FakeEngine(), "/api/pull", {"model": "demo"}))
    assert states[-1] == {"status": "success"}
    refused = request(FakeEngine(), "/api/pull", {"model": "llama3"})
    assert refused.status == 404 and "serves demo" in refused.json["error"]


class Downloads:
    """A download that begins, and ends when `go` is set."""

    def __init__(self, last: Progress) -> None:
        self.last = last
        self.go = asyncio.Event()
        self.go.set()
        self.names: list[str] = []
        self.is_over = False

    async def __call__(self, name: str) -> AsyncGenerator[Progress, None]:
        self.names.append(name)
        try:
            yield Progress("pulling manifest")
            yield Progress("pulling a", "a", 10, 5)
            await self.go.wait()
            yield self.last
        finally:
            self.is_over = True


SWAPPABLE: dict[str, Any] = {"admin_keys": (ApiKey("admin"),), "enable_model_swap": True}
ADMIN = {"authorization": "Bearer admin"}


def test_an_administrator_downloads_a_model() -> None:
    downloads = Downloads(Progress("success"))
    body = {"model": "hf.co/org/other:latest"}
    states = lines(request(FakeEngine(), "/api/pull", body, headers=ADMIN, download=downloads, **SWAPPABLE))
    part = {"status": "pulling a", "digest": "a", "total": 10, "completed": 5}
    assert states == [{"status": "pulling manifest"}, part, {"status": "success"}]
    whole = request(
        FakeEngine(), "/api/pull", {**body, "stream": False}, headers=ADMIN, download=downloads, **SWAPPABLE
    )
    assert whole.json == {"status": "success"} and downloads.names == ["org/other", "org/other"]


def test_a_download_that_fails_says_why() -> None:
    def pull(**fields: object) -> Answer:
        body = {"model": "org/other", **fields}
        failing = Downloads(Progress(error="There is none."))
        return request(FakeEngine(), "/api/pull", body, headers=ADMIN, download=failing, **SWAPPABLE)

    assert lines(pull())[-1] == {"error": "There is none."}
    assert (pull(stream=False).status, pull(stream=False).json["error"]) == (400, "There is none.")


@pytest.mark.parametrize(
    ("settings", "headers", "words"),
    [
        (SWAPPABLE, {}, "only an administrator's key downloads models"),
        ({**SWAPPABLE, "api_keys": ("user",)}, {"authorization": "Bearer user"}, "only an administrator's key"),
        ({"admin_keys": (ApiKey("admin"),)}, ADMIN, "downloads no model while it serves"),
        ({}, {}, "downloads no model while it serves"),
    ],
)
def test_nobody_else_downloads_a_model(settings: dict[str, Any], headers: dict[str, str], words: str) -> None:
    downloads = Downloads(Progress("success"))
    body = {"model": "org/other"}
    answer = request(FakeEngine(), "/api/pull", body, headers=headers, download=downloads, **settings)
    assert (answer.status, downloads.names) == (404, []) and words in answer.json["error"]


def test_a_download_ends_with_its_client_and_is_the_only_one() -> None:
    downloads = Downloads(Progress("success"))
    body = json.dumps({"model": "org/other"}).encode()

    async def pull() -> None:
        downloads.go.clear()
        app = make_app(FakeEngine(), download=downloads, **SWAPPABLE)
        client, begun = Client(app), asyncio.Event()
        client.on_part = lambda part: begun.set()
        first = asyncio.ensure_future(client.call("POST", "/api/pull", body, ADMIN))
        await begun.wait()
        second = await Client(app).call("POST", "/api/pull", body, ADMIN)
        assert second.status == 409 and "Another model" in second.json["error"] and not downloads.is_over
        client.leave()
        await first
        assert downloads.is_over
        downloads.go.set()
        assert (await Client(app).call("POST", "/api/pull", body, ADMIN)).status == 200

    run(pull())


def test_vectors() -> None:
    engine = FakeEngine()
    body = request(engine, "/api/embed", {"model": "demo", "input": ["a", "b"], "options": {"num_ctx": 5}}).json
    assert body["embeddings"] == [[0.5, -1.0], [0.25, 2.0]] and body["prompt_eval_count"] > 0
    pooling = engine.submits[0].pooling
    assert pooling is not None and pooling.truncate == 128 and pooling.is_normalized
    assert request(engine, "/api/embed", {"model": "demo", "input": []}).json["embeddings"] == []
    assert request(FakeEngine(), "/api/embeddings", {"model": "demo", "prompt": "a"}).json == {"embedding": [0.5, -1.0]}


@pytest.mark.parametrize("content_type", ["application/x-www-form-urlencoded", "text/plain"])
def test_clients_need_not_say_that_they_send_json(content_type: str) -> None:
    answer = request(FakeEngine(), "/api/chat", {**HI, "stream": False}, headers={"content-type": content_type})
    assert answer.json["message"]["content"] == "Hello"
