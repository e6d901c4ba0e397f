"""Files and batches: what a client sees, and that a batch goes on where an earlier server has ended."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from harness import Answer, Client, FakeEngine, make_app, run
from waiting import until_async

from pagewire.api.batches import runner

BOUNDARY = "a-line-between"


def request_line(custom_id: str, *, url: str = "/v1/completions", **body: Any) -> str:
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": url, "body": {"prompt": "abc"} | body}) + "\n"


def form(content: str, *, purpose: str = "batch", name: str = "file") -> bytes:
    return (
        f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="purpose"\r\n\r\n{purpose}\r\n'
        f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="{name}"; filename="in.jsonl"\r\n\r\n{content}\r\n'
        f"--{BOUNDARY}--\r\n"
    ).encode()


class Batches:
    """One server, and its client."""

    def __init__(self, engine: FakeEngine, **config: Any) -> None:
        self.engine = engine
        self.app = make_app(engine, **config)
        self.key = "one"

    async def call(self, method: str, path: str, body: Any = None, **headers: str) -> Answer:
        data = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
        sent = {"authorization": f"Bearer {self.key}"} | headers
        answer: Answer = await Client(self.app).call(method, path, data, sent)
        return answer

    async def upload(self, content: str, **fields: str) -> Answer:
        kind = f"multipart/form-data; boundary={BOUNDARY}"
        return await self.call("POST", "/v1/files", form(content, **fields), **{"content-type": kind})

    async def create(self, content: str, endpoint: str = "/v1/completions") -> dict[str, Any]:
        file_id = (await self.upload(content)).json["id"]
        body = {"input_file_id": file_id, "endpoint": endpoint, "completion_window": "24h", "metadata": {"k": "v"}}
        answer = await self.call("POST", "/v1/batches", body)
        assert answer.status == 200 and answer.json["status"] == "validating", answer.body
        return dict(answer.json)

    async def until(self, id: str, *statuses: str) -> dict[str, Any]:
        """The batch, as soon as it has one of the statuses."""
        while (batch := (await self.call("GET", f"/v1/batches/{id}")).json)["status"] not in statuses:
            await asyncio.sleep(0)
        return dict(batch)

    async def lines(self, file_id: str | None) -> list[dict[str, Any]]:
        if file_id is None:
            return []
        answer = await self.call("GET", f"/v1/files/{file_id}/content")
        return [json.loads(line) for line in answer.body.splitlines()]


def play(
    work: Callable[[Batches], Awaitable[None]], engine: FakeEngine | None = None, *, start: bool = False, **config: Any
) -> None:
    async def whole() -> None:
        batches = Batches(engine or FakeEngine(), **config)
        if start:
            batches.app.start()
        try:
            await work(batches)
        finally:
            await batches.app.stop()

    run(whole())


def test_a_file_is_kept_listed_read_and_deleted() -> None:
    async def work(server: Batches) -> None:
        content = request_line("a") * 3
        file = (await server.upload(content)).json
        assert file | {"id": "", "created_at": 0} == {
            "id": "",
            "object": "file",
            "bytes": len(content),
            "created_at": 0,
            "filename": "in.jsonl",
            "purpose": "batch",
            "status": "processed",
        }
        assert (await server.call("GET", f"/v1/files/{file['id']}")).json == file
        assert (await server.call("GET", f"/v1/files/{file['id']}/content")).body == content.encode()
        second = (await server.upload(content)).json
        page = (await server.call("GET", "/v1/files?limit=1")).json
        assert page["data"] == [second] and page["has_more"] is True and page["last_id"] == second["id"]
        page = (await server.call("GET", f"/v1/files?limit=5&after={second['id']}")).json
        assert page["data"] == [file] and page["has_more"] is False
        assert (await server.call("DELETE", f"/v1/files/{file['id']}")).json["deleted"] is True
        assert (await server.call("GET", f"/v1/files/{file['id']}")).status == 404

    play(work)


def test_a_batch_is_answered_by_the_endpoints() -> None:
    async def work(server: Batches) -> None:
        lines = [request_line(str(i)) for i in range(20)] + [request_line("bad", temperature=9)]
        batch = await server.create("".join(lines) + "\n")
        ended = await server.until(batch["id"], "completed", "failed")
        assert ended["request_counts"] == {"total": 21, "completed": 20, "failed": 1}
        assert ended["metadata"] == {"k": "v"} and ended["completed_at"] >= ended["in_progress_at"]
        answers = await server.lines(ended["output_file_id"])
        assert {answer["custom_id"] for answer in answers} == {str(i) for i in range(20)}
        for answer in answers:
            response = answer["response"]
            assert response["status_code"] == 200 and answer["error"] is None
            assert response["body"]["choices"][0]["text"] == "Hello" and response["request_id"] in answer["id"]
        (bad,) = await server.lines(ended["error_file_id"])
        assert bad["custom_id"] == "bad" and bad["response"]["status_code"] == 400
        assert "temperature" in bad["error"]["message"]
        listed = (await server.call("GET", "/v1/batches")).json["data"]
        assert listed == [ended]

    play(work)


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ("", "The file holds no request."),
        ("{\n", "Line 1: "),
        (request_line("a") * 2, "Line 2: custom_id 'a' stands there twice."),
        (request_line("a", url="/v1/chat/completions"), "Line 1: the batch is for /v1/completions, this is for"),
        (request_line("a", url="/metrics"), "Line 1: POST /metrics is no request of a batch"),
        (request_line("a", stream=True), "Line 1: a batch has no streams"),
        (request_line("a") + request_line("b", user="x" * 2000), "Line 2: a request has at most 2000 bytes."),
    ],
)
def test_a_wrong_file_fails_the_batch_before_anything_is_sent(content: str, complaint: str) -> None:
    engine = FakeEngine()

    async def work(server: Batches) -> None:
        batch = await server.create(content)
        ended = await server.until(batch["id"], "completed", "failed")
        assert ended["status"] == "failed" and not engine.submits
        assert ended["errors"]["data"][0]["message"].startswith(complaint)

    play(work, engine, max_body_size=2000)


def test_a_cancelled_batch_keeps_what_it_has() -> None:
    engine = FakeEngine()

    async def work(server: Batches) -> None:
        batch = await server.create(request_line("first"))
        await server.until(batch["id"], "completed")
        engine.hold = True
        batch = await server.create("".join(request_line(str(i)) for i in range(50)))
        await until_async(lambda: len(engine.open) == 8, "as many are open as run at once")
        busy = (await server.call("DELETE", f"/v1/files/{batch['input_file_id']}")).status
        assert busy == 409 and len(engine.open) == 8
        answer = await server.call("POST", f"/v1/batches/{batch['id']}/cancel")
        assert answer.json["status"] == "cancelling"
        ended = await server.until(batch["id"], "cancelled")
        assert not engine.open and ended["output_file_id"] is None
        assert (await server.call("POST", f"/v1/batches/{batch['id']}/cancel")).status == 409

    play(work, engine)


def test_a_busy_engine_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "_PAUSE_S", 0.001)
    engine = FakeEngine()
    engine.refuse = ("queue_full", "The queue is full.")

    async def work(server: Batches) -> None:
        batch = await server.create(request_line("a"))
        await until_async(lambda: len(engine.submits) >= 3, "it is asked again")
        engine.refuse = None
        assert (await server.until(batch["id"], "completed"))["request_counts"]["completed"] == 1

    play(work, engine)


def test_the_next_server_goes_on(tmp_path: Path) -> None:
    ids: list[str] = []
    engine = FakeEngine()

    async def begin(server: Batches) -> None:
        batch = await server.create("".join(request_line(str(i)) for i in range(30)))
        ids.append(batch["id"])
        while (await server.call("GET", f"/v1/batches/{ids[0]}")).json["request_counts"]["completed"] < 5:
            await asyncio.sleep(0)
        engine.hold = True

    play(begin, engine, batch_folder=str(tmp_path))
    output = tmp_path / f"{ids[0]}.output"
    num_done = len(output.read_text().splitlines())
    assert 5 <= num_done < 30
    with output.open("a") as file:
        file.write('{"custom_id": "cut sho')  # as after a power cut
    again = FakeEngine()

    async def go_on(server: Batches) -> None:
        ended = await server.until(ids[0], "completed")
        assert ended["request_counts"] == {"total": 30, "completed": 30, "failed": 0}
        answers = [answer["custom_id"] for answer in await server.lines(ended["output_file_id"])]
        assert sorted(answers, key=int) == [str(i) for i in range(30)]
        assert len(again.submits) == 30 - num_done

    play(go_on, again, start=True, batch_folder=str(tmp_path))


def test_a_batch_that_takes_too_long_expires(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pagewire.api.batches.endpoints.WINDOW_S", 1)
    engine = FakeEngine()
    engine.hold = True

    async def work(server: Batches) -> None:
        batch = await server.create(request_line("a"))
        ended = await server.until(batch["id"], "expired", "failed", "completed")
        assert ended["status"] == "expired" and not engine.open

    play(work, engine)


def test_answers_are_kept_where_there_is_no_room_for_uploads(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(server: Batches) -> None:
        batch = await server.create(request_line("a"))
        monkeypatch.setattr("pagewire.api.batches.store.MAX_STORED_BYTES", 0)
        ended = await server.until(batch["id"], "failed", "completed")
        assert ended["status"] == "completed" and len(await server.lines(ended["output_file_id"])) == 1
        assert (await server.upload("x")).status == 413

    play(work)


def test_files_and_batches_belong_to_their_key() -> None:
    async def work(server: Batches) -> None:
        batch = await server.create(request_line("a"))
        await server.until(batch["id"], "completed")
        server.key = "two"
        for path in (f"/v1/files/{batch['input_file_id']}", f"/v1/batches/{batch['id']}"):
            assert (await server.call("GET", path)).status == 404
        assert (await server.call("GET", "/v1/batches")).json["data"] == []
        body = {"input_file_id": batch["input_file_id"], "endpoint": "/v1/completions"}
        answer = await server.call("POST", "/v1/batches", body)
        assert answer.status == 400 and answer.error["param"] == "input_file_id"

    play(work, api_keys=("one", "two"))


def test_what_is_no_upload_and_no_batch_is_refused() -> None:
    async def work(server: Batches) -> None:
        answers = [
            (await server.upload("x", purpose="fine-tune"), "purpose"),
            (await server.upload("x", name="document"), "file"),
            (await server.call("POST", "/v1/files", {}), None),
            (await server.call("GET", "/v1/files?limit=0"), "limit"),
            (await server.call("GET", f"/v1/files?limit={'1' * 5000}"), "limit"),
            (await server.call("GET", "/v1/files?after=x"), "after"),
            (await server.call("POST", "/v1/batches", {"input_file_id": "x", "endpoint": "/load"}), "endpoint"),
            (await server.call("POST", "/v1/batches", {"input_file_id": "x"}), None),
            (
                await server.call(
                    "POST",
                    "/v1/batches",
                    {"input_file_id": "x", "endpoint": "/v1/completions", "completion_window": "1h"},
                ),
                "completion_window",
            ),
        ]
        for answer, param in answers:
            assert answer.status == 400 and answer.error["param"] == param, answer.body
        size = {"content-type": "multipart/form-data; boundary=x", "content-length": str(1 << 30)}
        assert (await server.call("POST", "/v1/files", b"", **size)).status == 413
        assert (await server.call("GET", "/v1/batches/batch_x")).error["code"] == "not_found"

    play(work)
