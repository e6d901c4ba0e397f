"""What a server keeps for the next one, with real processes: a batch and a response go on where a crash left them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from waiting import until

from pagewire.tools.servers import Server

NUM = 40


def get(server: Server, path: str) -> dict[str, Any]:
    body: dict[str, Any] = httpx.get(server.url + path, timeout=60).json()
    return body


def post(server: Server, path: str, body: dict[str, Any]) -> dict[str, Any]:
    answer: dict[str, Any] = httpx.post(server.url + path, json=body, timeout=60).json()
    return answer


@pytest.mark.long
def test_work_goes_on_after_a_crash(start: Callable[..., Server], tmp_path: Path) -> None:
    flags = ("--state", str(tmp_path / "state"), "--api-processes", "2", "--kv-cache-memory", "64M")
    server = start(*flags, "--max-num-seqs", "2").wait_ready()
    lines = [
        {
            "custom_id": str(i),
            "method": "POST",
            "url": "/v1/completions",
            "body": {"prompt": "Count", "max_tokens": 200, "ignore_eos": True},
        }
        for i in range(NUM)
    ]
    upload = {"file": ("in.jsonl", "\n".join(map(json.dumps, lines))), "purpose": (None, "batch")}
    file = httpx.post(f"{server.url}/v1/files", files=upload, timeout=60).json()
    asked = {"input_file_id": file["id"], "endpoint": "/v1/completions", "completion_window": "24h"}
    batch = f"/v1/batches/{post(server, '/v1/batches', asked)['id']}"
    until(lambda: get(server, batch)["request_counts"]["completed"] >= 3, "some requests are answered", 60)
    made = post(server, "/v1/responses", {"input": "Count from 1 to 5", "background": True, "temperature": 0})
    server.kill()
    following = start(*flags).wait_ready()
    until(lambda: get(following, batch)["status"] == "completed", "the next server answers the rest", 90)
    ended = get(following, batch)
    assert ended["request_counts"] == {"total": NUM, "completed": NUM, "failed": 0}
    content = httpx.get(f"{following.url}/v1/files/{ended['output_file_id']}/content", timeout=60).text
    assert [json.loads(line)["custom_id"] for line in content.splitlines()] == [str(i) for i in range(NUM)]
    path = f"/v1/responses/{made['id']}"
    until(lambda: get(following, path)["status"] == "completed", "the response is made", 60)
    assert get(following, path)["output"][0]["content"][0]["text"] == "1, 2, 3, 4, 5"
    assert following.stop() == 0
