"""Several api processes on one port: one that dies loses its own connections, and the core drops their requests."""

import threading
from collections.abc import Callable

import httpx
from waiting import until

from pagewire.tools.servers import Server

NUM = 12


def test_a_killed_api_process_loses_only_its_own_connections(start: Callable[..., Server]) -> None:
    server = start("--api-processes", "2", "--kv-cache-memory", "64M").wait_ready()
    texts: dict[int, str] = {}
    begun = threading.Barrier(NUM + 1, timeout=60)

    def stream(i: int) -> None:
        body = {"prompt": "Count", "max_tokens": 400, "ignore_eos": True, "temperature": 0, "stream": True}
        try:
            with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60) as response:
                lines = response.iter_lines()
                first_lines = [next(lines)]
                begun.wait()
                texts[i] = "\n".join(line for line in [*first_lines, *lines] if '"text"' in line)
        except httpx.HTTPError:
            texts[i] = "broken"

    threads = [threading.Thread(target=stream, args=(i,)) for i in range(NUM)]
    for thread in threads:
        thread.start()
    begun.wait()
    server.children()["api-1"].kill()
    for thread in threads:
        thread.join(60)
    whole = [text for text in texts.values() if text != "broken"]
    assert len(texts) == NUM and all(len(text.splitlines()) > 100 for text in whole)
    until(
        lambda: "api-1" in server.children() and not server.metric("pagewire:num_requests_running"),
        "api-1 is replaced and no request runs",
        30,
    )
    for _ in range(8):  # new connections reach both processes
        answer = httpx.post(f"{server.url}/v1/completions", json={"prompt": "a", "max_tokens": 2}, timeout=60)
        assert answer.status_code == 200
    assert "api-1 was killed by SIGKILL" in server.log.read_text()
    assert server.stop() == 0
