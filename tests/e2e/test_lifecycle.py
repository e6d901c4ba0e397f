"""Start and end of a server's processes: the announced start, signals, and one sentence when it cannot start."""

import http.client
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from waiting import until

from pagewire.tools.servers import ROOT, Server, free_port, is_alive

pytestmark = pytest.mark.e2e
Start = Callable[..., Server]
ACTORS = {"api", "tokenizer", "core", "grammar", "worker", "detokenizer"}


def open_stream(server: Server, events: list[bytes]) -> threading.Thread:
    """A long stream that is read on a thread, which appends its events to `events`."""
    body = {
        "messages": [{"role": "user", "content": "Count from 1 to 9"}],
        "stream": True,
        "max_tokens": 8000,
        "ignore_eos": True,
    }

    def read() -> None:
        request = urllib.request.Request(
            f"{server.url}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=60) as response:
            events.extend(line.strip() for line in response if line.strip())
        events.append(b"<end of body>")

    thread = threading.Thread(target=read)
    thread.start()
    return thread


def idle_connection(server: Server) -> http.client.HTTPConnection:
    """A connection that is opened before the server stops accepting new ones."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    assert is_ready(connection)
    return connection


def is_ready(connection: http.client.HTTPConnection) -> bool:
    connection.request("GET", "/ready")
    response = connection.getresponse()
    response.read()
    return response.status == 200


def test_the_announced_phases_of_the_start_add_up_to_the_total(server: Server) -> None:
    log = server.announced()
    parts = [float(x) for x in re.findall(r"^ +(\d+\.\d\d) s  (?!total)", log, re.MULTILINE)]
    (total,) = re.findall(r"^ +(\d+\.\d\d) s  total", log, re.MULTILINE)
    assert len(parts) == 4 and abs(sum(parts) - float(total)) <= 0.01 * len(parts)
    (detail,) = re.findall(r"\d+\.\d\d s  worker ready  \((.*)\)", log)
    inner = [float(part.rpartition(" ")[2]) for part in detail.split(", ")]
    # The process starts before this phase begins, so its parts may be longer than the phase.
    assert inner and sum(inner) <= float(total) + 0.01 * len(inner)
    assert "KV cache" in log and f"curl -N {server.url}" in log


def test_every_process_is_named_and_only_the_worker_has_torch(server: Server) -> None:
    children = server.children()
    assert set(children) == ACTORS
    for name, process in children.items():
        has_torch = any("libtorch" in mapping.path for mapping in process.memory_maps())
        assert has_torch == (name == "worker"), name


def test_an_idle_server_uses_less_than_a_tenth_of_a_core(server: Server) -> None:
    processes = [psutil.Process(server.process.pid), *server.children().values()]
    before = sum(sum(p.cpu_times()[:2]) for p in processes)
    began = time.monotonic()
    time.sleep(2.0)
    spent = sum(sum(p.cpu_times()[:2]) for p in processes) - before
    elapsed = time.monotonic() - began
    assert spent < 0.1 * elapsed, f"{spent:.2f} s of CPU in {elapsed:.2f} s of idling"


def test_the_run_folders_are_private(server: Server) -> None:
    folders = list(server.run_root.glob("pagewire-*"))
    assert len(folders) == 2  # of the sockets, and of what the api stores
    for folder in folders:
        assert folder.stat().st_mode & 0o777 == 0o700
        assert all(path.stat().st_mode & 0o077 == 0 for path in folder.iterdir())


def test_sigterm_ends_streams_with_an_error_event_after_the_drain_timeout(start: Start) -> None:
    server = start("--drain-timeout", "4").wait_ready()
    idle = idle_connection(server)
    children = list(server.children().values())
    streams: list[list[bytes]] = [[] for _ in range(10)]
    threads = [open_stream(server, events) for events in streams]
    until(lambda: server.metric("pagewire:num_requests_running") == 10, "ten streams run", 60)
    num_before = sum(map(len, streams))
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(60) == 0, server.log.read_text()
    idle.close()
    for thread in threads:
        thread.join(60)
    assert sum(map(len, streams)) > num_before + 200, "the streams continue while the server drains"
    for events in streams:
        assert events[-1] == b"<end of body>", "the body was cut"
        last = json.loads(events[-2].removeprefix(b"data: "))
        assert "shutting down" in last["error"]["message"] and all(e.startswith(b"data: {") for e in events[:-1])
    until(lambda: not any(map(is_alive, children)), "all processes have ended", 30)
    assert not list(server.run_root.glob("pagewire-*"))


def test_a_second_signal_of_either_kind_stops_at_once(start: Start) -> None:
    server = start().wait_ready()
    children = list(server.children().values())
    thread = open_stream(server, [])
    until(lambda: server.metric("pagewire:num_requests_running") == 1, "the stream runs", 60)
    idle = idle_connection(server)
    server.process.send_signal(signal.SIGINT)
    until(lambda: not is_ready(idle), "the server drains")
    assert server.process.poll() is None and thread.is_alive(), "after the first signal open requests continue"
    idle.close()
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(30) == 130
    until(lambda: not any(map(is_alive, children)), "all processes have ended", 30)
    thread.join(60)


def test_kill_9_of_the_supervisor_leaves_no_process(start: Start) -> None:
    server = start().wait_ready()
    children = list(server.children().values())
    assert len(children) == len(ACTORS)
    server.process.kill()
    until(lambda: not any(map(is_alive, children)), "all processes have ended", 30)


def test_a_signal_ends_a_start_of_which_some_processes_do_not_run_yet(start: Start) -> None:
    server = start()
    until(lambda: psutil.Process(server.process.pid).children(), "a process runs", 60)
    server.process.terminate()
    assert server.process.wait(60) == 0
    assert "Traceback" not in server.log.read_text()


@pytest.fixture
def late_worker(tmp_path: Path) -> dict[str, str]:
    """An environment in which the process that forks the worker begins 20 s late."""
    late = 'import sys, time\nif "pagewire.procs.template" in sys.orig_argv:\n    time.sleep(20)\n'
    (tmp_path / "sitecustomize.py").write_text(late)
    return {"PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])}


def test_the_death_of_a_process_ends_the_start_with_a_message(start: Start, late_worker: dict[str, str]) -> None:
    server = start(environment=late_worker)
    until(lambda: server.children().get("tokenizer"), "the tokenizer runs", 60).kill()  # type: ignore[union-attr]
    assert server.process.wait(60) == 1
    assert "tokenizer was killed by SIGKILL" in server.log.read_text()


def test_a_start_timeout_names_the_late_process(start: Start, late_worker: dict[str, str]) -> None:
    server = start("--start-timeout-s", "1", environment=late_worker)
    code = server.process.wait(60)
    log = server.log.read_text()
    assert code == 1 and "worker" in log and "not ready in time (1 s" in log


@pytest.fixture
def broken(tmp_path: Path) -> Callable[[str], Path]:
    """Copies the demo model and damages the copy."""

    def make(defect: str) -> Path:
        folder = tmp_path / "model"
        shutil.copytree(ROOT / "demo_model", folder)
        config = json.loads((folder / "config.json").read_text())
        weights = folder / "model.safetensors"
        match defect:
            case "no architecture":
                del config["architectures"]
            case "unknown architecture":
                config["architectures"], config["model_type"] = ["FooForCausalLM"], "foo"
            case "other shape":
                config["intermediate_size"] += 8
            case "truncated":
                weights.write_bytes(weights.read_bytes()[:100_000])
            case "no weights":
                weights.unlink()
            case "no tokenizer":
                (folder / "tokenizer.json").write_text("{")
            case "not json":
                config = None
        (folder / "config.json").write_text("{" if config is None else json.dumps(config))
        return folder

    return make


@pytest.mark.parametrize(
    ("defect", "sentence"),
    [
        ("no architecture", "names no architecture"),
        ("unknown architecture", "FooForCausalLM"),
        ("other shape", "512"),
        ("truncated", "model.safetensors"),
        ("no weights", "safetensors"),
        ("no tokenizer", "tokenizer.json"),
        ("not json", "config.json"),
    ],
)
def test_a_broken_model_gives_one_sentence(
    start: Start, broken: Callable[[str], Path], defect: str, sentence: str
) -> None:
    server = start(str(broken(defect)))
    assert server.process.wait(60) == 2, server.log.read_text()
    lines = server.log.read_text().strip().splitlines()
    (line,) = [line for line in lines if "still waiting for" not in line]  # printed on a busy machine
    assert line.startswith("pagewire: ") and sentence in line and line.endswith(".")


def test_a_missing_folder_gives_one_sentence(start: Start) -> None:
    server = start("./nowhere")
    assert server.process.wait(60) == 2
    assert server.log.read_text() == "pagewire: There is no folder ./nowhere.\n"


def test_a_hub_name_that_cannot_be_downloaded_gives_one_sentence(start: Start) -> None:
    server = start("nobody/nothing-1b")  # the tests run with HF_HUB_OFFLINE=1
    assert server.process.wait(60) == 2
    assert server.log.read_text().count("\n") == 1 and "nobody/nothing-1b" in server.log.read_text()


def test_a_port_in_use_gives_one_sentence(start: Start) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        server = start("--port", str(taken.getsockname()[1]))
        assert server.process.wait(60) == 2
    lines = server.log.read_text().strip().splitlines()
    (line,) = [line for line in lines if "still waiting for" not in line]  # printed on a busy machine
    assert "Choose another --port" in line


def test_two_launches_serve_together_over_tcp(start: Start, tmp_path: Path) -> None:
    ports = {name: free_port() for name in ACTORS}
    addresses = [f"{name}=tcp://127.0.0.1:{port}" for name, port in ports.items()]
    launch = (sys.executable, "-m", "pagewire.procs.launch", "--threads", "1")
    common = ["--key-file", str(tmp_path / "key"), "--address", *addresses]
    engine = start("--actors", "worker,core,grammar", *common, command=launch)
    until(lambda: (tmp_path / "key").exists(), "the key is made", 60)
    frontend = start("--actors", "tokenizer,detokenizer,api", *common, command=launch).wait_ready()
    until(lambda: set(engine.children()) == {"worker", "core", "grammar"}, "the worker is forked", 60)
    assert set(frontend.children()) == {"tokenizer", "detokenizer", "api"}
    body = {"messages": [{"role": "user", "content": "Count from 1 to 5"}], "temperature": 0}
    request = urllib.request.Request(
        f"{frontend.url}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        assert json.load(response)["choices"][0]["message"]["content"] == "1, 2, 3, 4, 5"
    assert frontend.stop() == 0 and engine.stop() == 0


def test_an_address_beyond_loopback_without_a_key_is_refused(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "pagewire.procs.launch",
        "--actors",
        "core",
        "--address",
        "core=tcp://0.0.0.0:7000",
    ]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=tmp_path, check=False)
    assert result.returncode == 2 and "--key-file" in result.stderr
