"""A real server that is put to sleep in the middle of a stream."""

import json
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
    expected = httpx.post(f"{server.url}/v1/completions", json=ASK, timeout=300).json()["choices"][0]["text"]
    worker = server.children()["worker"]
    texts: list[list[str]] = []
    is_enough = threading.Event()
    done = threading.Event()

    def read() -> None:
        """Reads streams one after the other, so that one runs whenever the engine falls asleep."""
        while not is_enough.is_set():
            texts.append([])
            ask = {**ASK, "stream": True}
            with httpx.stream("POST", f"{server.url}/v1/completions", json=ask, timeout=300) as stream:
                for line in stream.iter_lines():
                    if line.startswith("data: {"):
                        texts[-1].append(json.loads(line[6:])["choices"][0]["text"])
        done.set()

    def num_chunks() -> int:
        return sum(map(len, texts))

    def is_quiet() -> bool:
        before = num_chunks()
        return not done.wait(0.3) and num_chunks() == before

    threading.Thread(target=read, daemon=True).start()
    until(lambda: num_chunks() > 5, "the stream has begun", 60)
    awake = worker.memory_info().rss
    answer = httpx.post(f"{server.url}/sleep", headers=ADMIN, timeout=60)
    assert answer.status_code == 200 and answer.json() == {
        "is_sleeping": True,
        "freed_bytes": answer.json()["freed_bytes"],
    }
    assert answer.json()["freed_bytes"] > 60 << 20 and worker.memory_info().rss < awake
    assert httpx.get(f"{server.url}/ready", timeout=60).status_code == 503
    until(lambda: server.answers("/health"), "it is healthy", 60)
    assert httpx.get(f"{server.url}/is_sleeping", headers=ADMIN, timeout=60).json() == {"is_sleeping": True}
    until(
        lambda: is_quiet() and len("".join(texts[-1])) < len(expected),
        "what was in flight has arrived, and no more of the stream comes",
        60,
    )
    is_enough.set()
    assert httpx.post(f"{server.url}/wake_up", timeout=60).status_code == 401
    assert httpx.post(f"{server.url}/wake_up", headers=ADMIN, timeout=60).json() == {"is_sleeping": False}
    assert done.wait(300) and {"".join(text) for text in texts} == {expected}
    until(lambda: server.answers("/ready"), "it is ready", 60)
