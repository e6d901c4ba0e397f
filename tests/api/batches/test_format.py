"""Invalid batch files."""

import pytest
from harness import FakeEngine

from .test_endpoints import Batches, request_line, run_work


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ("", "The file has no requests."),
        ("{\n", "Line 1: "),
        (request_line("a") * 2, "Line 2: custom_id 'a' appears twice."),
        (request_line("a", url="/v1/chat/completions"), "Line 1: the batch is for /v1/completions, this is for"),
        (request_line("a", url="/metrics"), "Line 1: POST /metrics cannot be a request of a batch"),
        (request_line("a", stream=True), "Line 1: a batch has no streams"),
        (request_line("a") + request_line("b", user="x" * 2000), "Line 2: a request has at most 2000 bytes."),
    ],
)
def test_an_invalid_file_fails_the_batch_before_any_submit(content: str, complaint: str) -> None:
    engine = FakeEngine()

    async def work(server: Batches) -> None:
        batch = await server.create(content)
        ended = await server.until(batch["id"], "completed", "failed")
        assert ended["status"] == "failed" and not engine.submits
        assert ended["errors"]["data"][0]["message"].startswith(complaint)

    run_work(work, engine, max_body_size=2000)
