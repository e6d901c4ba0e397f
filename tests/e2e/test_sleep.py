"""A real server that is put to sleep in the middle of a stream."""

import threading
from collections.abc import Callable

import httpx
import pytest
from waiting import until

from pagewire.tools.servers import Server

pytestmark = pytest.mark.e2e

ADMIN = {"authorization": "Bearer of-the-administrator"}
ASK = {"prompt": "Once upon a time", "max_tokens": 2000, "temperature": 0, "ignore_eos": True}


def test_a_stream_pauses_while_the_engine_sleeps(start: Callable[..., Server]) -> None:
    server = start(
        "--enable-sleep-mode", "--admin-api-key", "of-the-administrator", "--kv-cache-memory", "64M"
    ).wait_ready()
    expected = httpx.post(f"{server.url}/v1/completions", json=ASK, timeout=60).json()["choices"][0]["text"]
    worker = server.children()["worker"]
    text: list[str] = []
    done = threading.Event()

    def read() -> None:
        with httpx.stream("POST", f"{server.url}/v1/completions", json={**ASK, "stream": True}, timeout=60) as stream:
            for line in stream.iter_lines():
                if line.startswith("data: {"):
                    text.append(httpx.Response(200, content=line[6:]).json()["choices"][0]["text"])
        done.set()

    threading.Thread(target=read, daemon=True).start()
    until(lambda: len(text) > 5, "the stream has begun")
    awake = worker.memory_info().rss
    answer = httpx.post(f"{server.url}/sleep", headers=ADMIN, timeout=60)
    assert answer.status_code == 200 and answer.json() == {
        "is_sleeping": True,
        "freed_bytes": answer.json()["freed_bytes"],
    }
    assert answer.json()["freed_bytes"] > 60 << 20 and worker.memory_info().rss < awake
    assert httpx.get(f"{server.url}/ready").status_code == 503 and server.answers("/health")
    assert httpx.get(f"{server.url}/is_sleeping", headers=ADMIN).json() == {"is_sleeping": True}
    assert not done.wait(0.3)
    arrived = len(text)
    assert not done.wait(0.3) and len(text) == arrived, "only chunks that were in flight may still arrive"
    assert httpx.post(f"{server.url}/wake_up").status_code == 401
    assert httpx.post(f"{server.url}/wake_up", headers=ADMIN, timeout=60).json() == {"is_sleeping": False}
    assert done.wait(60) and "".join(text) == expected
    assert httpx.get(f"{server.url}/ready").status_code == 200
