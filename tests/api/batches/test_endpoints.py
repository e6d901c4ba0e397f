"""Files and batches over HTTP, and the helpers of the tests of this folder."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

from harness import Answer, Client, FakeEngine, make_app, run

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
    """A server and its client."""

    def __init__(self, engine: FakeEngine, **config: Any) -> None:
        self.engine = engine
        self.app = make_app(engine, **config)
        self.key = "one"

    async def call(self, method: str, path: str, body: Any = None, **headers: str) -> Answer:
        data = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
        headers_sent = {"authorization": f"Bearer {self.key}"} | headers
        answer: Answer = await Client(self.app).call(method, path, data, headers_sent)
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
        """Wait until the batch has one of the statuses."""
        while (batch := (await self.call("GET", f"/v1/batches/{id}")).json)["status"] not in statuses:
            await asyncio.sleep(0)
        return dict(batch)

    async def lines(self, file_id: str | None) -> list[dict[str, Any]]:
        if file_id is None:
            return []
        answer = await self.call("GET", f"/v1/files/{file_id}/content")
        return [json.loads(line) for line in answer.body.splitlines()]


def run_work(
    work: Callable[[Batches], Awaitable[None]], engine: FakeEngine | None = None, *, start: bool = False, **config: Any
) -> None:
    async def run_and_stop() -> None:
        batches = Batches(engine or FakeEngine(), **config)
        if start:
            batches.app.start()
        try:
            await work(batches)
        finally:
            await batches.app.stop()

    run(run_and_stop())


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

    run_work(work)


def test_invalid_uploads_and_batches_are_refused() -> None:
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

    run_work(work)
