"""Several api processes on one port: all find what one has stored, and one that dies loses only its own connections."""

import contextlib
import json
import sqlite3
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import psutil
from waiting import until

from pagewire.tools.servers import Server

NUM = 6  # streams of each api process


@contextlib.contextmanager
def stopped(process: psutil.Process, state: Path) -> Iterator[None]:
    """The process accepts no connection meanwhile, so another one does. It holds no lock on `state`, for which the
    others would wait."""

    def is_stopped() -> bool:
        process.suspend()
        until(lambda: process.status() == psutil.STATUS_STOPPED, "the process is stopped", 60)
        with contextlib.closing(sqlite3.connect(state, timeout=0, isolation_level=None)) as database:
            try:
                database.execute("BEGIN IMMEDIATE")
            except sqlite3.OperationalError:
                process.resume()
                return False
            return True

    until(is_stopped, "the process is stopped and holds no lock", 60)
    yield
    process.resume()


def num_tokens(events: str) -> int:
    choices = [json.loads(line.removeprefix("data: "))["choices"][0] for line in events.splitlines()]
    return sum(len(choice.get("token_ids") or []) for choice in choices)


def test_a_killed_api_process_loses_only_its_own_connections(start: Callable[..., Server], tmp_path: Path) -> None:
    state = tmp_path / "state"
    flags = ("--api-processes", "2", "--kv-cache-memory", "64M", "--state", str(state))
    server = start(*flags, "--hang-timeout-s", "60").wait_ready()  # stopped is not hung
    texts: dict[int, str] = {}

    def stream(i: int, max_tokens: int, begun: threading.Barrier) -> None:
        body = {"prompt": "Count", "max_tokens": max_tokens, "ignore_eos": True, "temperature": 0, "stream": True}
        body |= {"return_token_ids": True}
        try:
            with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60) as response:
                lines = response.iter_lines()
                first_lines = [next(lines)]
                begun.wait()
                texts[i] = "\n".join(line for line in [*first_lines, *lines] if '"text"' in line)
        except httpx.HTTPError:
            texts[i] = "broken"

    first, second = (server.children()[name] for name in ("api", "api-1"))
    with stopped(second, state):
        created = httpx.post(f"{server.url}/v1/responses", json={"input": "Count from 1 to 5"}, timeout=60)
        line = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "a", "max_tokens": 2}}
        upload = {"file": ("in.jsonl", json.dumps(line)), "purpose": (None, "batch")}
        file = httpx.post(f"{server.url}/v1/files", files=upload, timeout=60).json()
    with stopped(first, state):
        batch = {"input_file_id": file["id"], "endpoint": "/v1/completions", "completion_window": "24h"}
        batch = httpx.post(f"{server.url}/v1/batches", json=batch, timeout=60).json()
        body = {"input": "And back", "previous_response_id": created.json()["id"]}
        assert httpx.post(f"{server.url}/v1/responses", json=body, timeout=60).status_code == 200
    until(
        lambda: httpx.get(f"{server.url}/v1/batches/{batch['id']}", timeout=60).json()["status"] == "completed",
        "a batch that one process was given, with a file of the other, is answered",
        60,
    )
    threads = []
    # Those of the second process would take long to end by themselves.
    for other, numbers, max_tokens in ((second, range(NUM), 400), (first, range(NUM, 2 * NUM), 4000)):
        with stopped(other, state):
            begun = threading.Barrier(NUM + 1, timeout=60)
            threads += [threading.Thread(target=stream, args=(i, max_tokens, begun)) for i in numbers]
            for thread in threads[-NUM:]:
                thread.start()
            begun.wait()
    second.kill()
    for thread in threads:
        thread.join(60)
    assert len(texts) == 2 * NUM
    assert [i for i, text in sorted(texts.items()) if text == "broken"] == list(range(NUM, 2 * NUM))
    assert [num_tokens(texts[i]) for i in range(NUM)] == [400] * NUM
    until(
        lambda: "api-1" in server.children() and not server.metric("pagewire:num_requests_running"),
        "api-1 is replaced and no request runs",
        60,
    )
    for process in server.of_kind("api"):  # both serve new connections
        with stopped(process, state):
            answer = httpx.post(f"{server.url}/v1/completions", json={"prompt": "a", "max_tokens": 2}, timeout=60)
            assert answer.status_code == 200
    assert "api-1 was killed by SIGKILL" in server.log.read_text()
    assert server.stop() == 0
