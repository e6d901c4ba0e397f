"""Model swap in a running server: open streams finish on the old model, new requests get the new one."""

import http.client
import json
import shutil
import socket
import threading
from collections.abc import Callable
from pathlib import Path

import httpx
import psutil
import pytest
from hub import hub_of
from safetensors.torch import load_file, save_file
from waiting import until

from pagewire.tools.servers import ROOT, Server

Start = Callable[..., Server]
FLAGS = ("--enable-model-swap", "--admin-api-key", "admin", "--kv-cache-memory", "64M")
ADMIN = {"Authorization": "Bearer admin"}
LONG = {"prompt": "Count", "max_tokens": 4000, "ignore_eos": True, "stream": True, "temperature": 0}


def read_stream(url: str, lines: list[str]) -> None:
    with httpx.stream("POST", f"{url}/v1/completions", json=LONG, timeout=60) as response:
        lines += [line for line in response.iter_lines() if line]


def swap(server: Server, **fields: object) -> httpx.Response:
    return httpx.post(f"{server.url}/admin/models", json=fields, headers=ADMIN, timeout=60)


def served(server: Server) -> dict[str, object]:
    (card,) = httpx.get(f"{server.url}/v1/models", timeout=60).json()["data"]
    return card  # type: ignore[no-any-return]


def ask(server: Server) -> int:
    body = {"prompt": "a", "max_tokens": 2}
    return httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).status_code


def wait_for(server: Server, name: str) -> None:
    until(lambda: served(server)["id"] == name, f"{name} is served", 60)


@pytest.mark.long
def test_the_model_is_swapped_and_swapped_back(start: Start, tmp_path: Path) -> None:
    server = start(*FLAGS).wait_ready()
    other = tmp_path / "other"
    shutil.copytree(ROOT / "demo_model", other)
    wrong = swap(server, model=str(tmp_path / "nowhere"))
    assert wrong.status_code == 400 and "nowhere" in wrong.json()["error"]["message"]
    refused = swap(server, model=str(other), port=1)
    assert refused.status_code == 400 and "port" in refused.json()["error"]["message"]
    unknown = swap(server, version=7)
    assert unknown.status_code == 400 and "version 7" in unknown.json()["error"]["message"]
    plain = httpx.post(f"{server.url}/admin/models", json={"model": str(other)}, timeout=60)
    assert plain.status_code == 401 and ask(server) == 200

    stored = httpx.post(f"{server.url}/v1/responses", json={"input": "a"}, timeout=60).json()
    lines: list[str] = []
    reader = threading.Thread(target=read_stream, args=(server.url, lines))
    reader.start()
    until(lambda: lines or server.metric("pagewire:num_requests_running"), "the stream runs", 60)
    answer = swap(server, model=str(other), served_model_name=["other"])
    assert answer.status_code in (200, 202), answer.text  # 202: no memory for both models
    wait_for(server, "other")
    assert ask(server) == 200
    assert httpx.get(f"{server.url}/v1/responses/{stored['id']}", timeout=60).json() == stored
    reader.join(180)
    events = [line.removeprefix("data: ") for line in lines]
    assert events[-1] == "[DONE]" and json.loads(events[0])["model"] == "pagewire-demo"
    assert [version["state"] for version in served(server)["versions"]] == ["retired", "serving"]  # type: ignore[attr-defined]

    assert swap(server, version=1, drain=True).status_code == 202
    wait_for(server, "pagewire-demo")
    assert ask(server) == 200
    assert server.stop() == 0


@pytest.mark.long
def test_an_old_connection_gets_a_409_from_the_replaced_engine(start: Start, tmp_path: Path) -> None:
    server = start(*FLAGS).wait_ready()
    other = tmp_path / "other"
    shutil.copytree(ROOT / "demo_model", other)
    body = json.dumps({"version": 1}).encode()
    head = f"POST /admin/models HTTP/1.1\r\nhost: localhost\r\nauthorization: {ADMIN['Authorization']}\r\n"
    head += f"content-type: application/json\r\ncontent-length: {len(body)}\r\nexpect: 100-continue\r\n\r\n"
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as old:
        old.sendall(head.encode())
        # The first engine waits for the body of this request, so it does not end before it has answered it.
        assert old.recv(100) == b"HTTP/1.1 100 Continue\r\n\r\n"
        status = swap(server, model=str(other), served_model_name=["other"]).status_code
        if status == 200:
            wait_for(server, "other")
        else:  # there is no memory for both models: the other one is loaded when this request has ended
            assert status == 202
        old.sendall(body)
        answer = http.client.HTTPResponse(old)
        answer.begin()
        assert answer.status == 409 and b"has taken over" in answer.read()
    wait_for(server, "other")
    assert server.stop() == 0


@pytest.mark.long
def test_open_streams_finish_after_a_sigterm_during_a_swap(start: Start, tmp_path: Path) -> None:
    server = start(*FLAGS).wait_ready()
    other = tmp_path / "other"
    shutil.copytree(ROOT / "demo_model", other)
    launcher = psutil.Process(server.process.pid)
    before = len(launcher.children())
    lines: list[str] = []
    reader = threading.Thread(target=read_stream, args=(server.url, lines))
    reader.start()
    until(lambda: server.metric("pagewire:num_requests_running") == 1, "the stream runs", 60)
    answers: list[int] = []
    asker = threading.Thread(target=lambda: answers.append(swap(server, model=str(other)).status_code))
    asker.start()
    until(lambda: len(launcher.children()) > before or bool(answers), "the other engine starts", 60)
    assert server.stop() == 0
    reader.join(180)
    asker.join(60)
    assert lines[-1] == "data: [DONE]" and answers


@pytest.mark.long
def test_the_old_model_is_served_again_if_the_new_one_cannot_be_loaded(start: Start, tmp_path: Path) -> None:
    server = start(*FLAGS).wait_ready()
    other = tmp_path / "other"
    shutil.copytree(ROOT / "demo_model", other)
    (file,) = other.glob("*.safetensors")
    tensors = load_file(file)
    save_file(dict(sorted(tensors.items())[1:]), file)
    answer = swap(server, model=str(other))
    if answer.status_code == 422:  # there is memory for both models
        assert "could not be loaded" in answer.json()["error"]["message"] and ask(server) == 200
        assert swap(server, model=str(other), drain=True).status_code == 202
    until(lambda: "going back to the model before" in server.log.read_text(), "the swap has failed", 60)
    assert ask(server) == 200
    versions = served(server)["versions"]
    assert [version["state"] for version in versions] == ["retired", "serving"]  # type: ignore[attr-defined]
    assert len({version["root"] for version in versions}) == 1, "the broken model was never served"  # type: ignore[attr-defined]
    tried = httpx.get(f"{server.url}/admin/models", headers=ADMIN, timeout=60).json()["data"]
    assert [version["state"] for version in tried] == ["retired", "failed", "serving"]
    assert [version.get("problem", "") for version in tried] == ["", tried[1]["problem"], ""]
    assert "lacks" in tried[1]["problem"] or "missing" in tried[1]["problem"], tried
    assert server.stop() == 0


@pytest.mark.long
def test_a_model_that_was_pulled_from_the_hub_is_served(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with hub_of("org/tiny", ROOT / "demo_model").serving() as hub:
        environment = {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "hf"), "HF_HUB_OFFLINE": "0"}
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        server = start(*FLAGS).wait_ready()
        body = {"model": "org/tiny"}
        assert httpx.post(f"{server.url}/api/pull", json=body, timeout=60).status_code == 404 and not hub.paths
        pulled = httpx.post(f"{server.url}/api/pull", json=body, headers=ADMIN, timeout=120)
        states = [json.loads(line) for line in pulled.text.splitlines()]
        assert states[-1] == {"status": "success"}, states
        assert any(state.get("completed") and state["completed"] == state["total"] for state in states)
        answer = swap(server, model="org/tiny")
        assert answer.status_code in (200, 202), answer.text
        wait_for(server, "org/tiny")
        assert ask(server) == 200
        assert server.stop() == 0
