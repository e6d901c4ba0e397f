"""`pagewire bench serve` against the real application."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from served import Served

from pagewire.cli import main


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with Served() as server:
        yield server


def bench(server: Served, folder: Path, *argv: str) -> int:
    common = ["--port", str(server.port), "--input-len", "5", "--output-len", "8", "--disable-tqdm"]
    saves = ["--save-result", "--result-dir", str(folder), "--result-filename", "result.json"]
    return main(["bench", "serve", *common, *saves, *argv])


@pytest.mark.parametrize("backend", ["openai", "openai-chat"])
def test_a_load_gives_a_table_json_and_a_picture(
    server: Served, tmp_path: Path, capsys: pytest.CaptureFixture[str], backend: str
) -> None:
    code = bench(
        server, tmp_path, "--backend", backend, "--num-prompts", "6", "--max-concurrency", "2", "--num-warmups", "1",
        "--percentile-metrics", "ttft,e2el", "--metric-percentiles", "50,99.9", "--goodput", "ttft:600000",
        "--save-detailed", "--plot-timeline", "--metadata", "tp=2", "--request-rate", "500",
        "--ready-check-timeout-sec", "5",
    )  # fmt: skip
    printed = capsys.readouterr()
    assert code == 0, printed.err
    assert "Successful requests:                     6" in printed.out and "P99.9 E2EL (ms):" in printed.out
    found = json.loads((tmp_path / "result.json").read_text())
    assert found["completed"] == 6 and found["failed"] == 0 and found["backend"] == backend and found["tp"] == "2"
    assert found["request_rate"] == 500 and found["max_concurrency"] == 2 and found["p99.9_ttft_ms"] > 0
    assert found["request_goodput"] == pytest.approx(found["request_throughput"])
    assert found["generated_texts"] == ["Hello 🙂"] * 6 and found["total_output_tokens"] == sum(found["output_lens"])
    assert len(found["ttfts"]) == len(found["itls"]) == 6 and found["errors"] == [""] * 6
    assert (tmp_path / "result.png").read_bytes()[:4] == b"\x89PNG"


def test_failed_requests_are_counted_and_shown(
    server: Served, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench(server, tmp_path, "--num-prompts", "2", "--extra-body", '{"temperature": -1}') == 1
    printed = capsys.readouterr()
    assert "Failed requests:                         2" in printed.out
    assert "The first of 2 failures: 400: " in printed.err and "temperature" in printed.err


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        (["--extra-body", "{"], "--extra-body must be a JSON object."),
        (["--percentile-metrics", "speed"], "--percentile-metrics: speed is not one of ttft, tpot, itl, e2el."),
        (["--metric-percentiles", "many"], "--metric-percentiles many: write numbers such as 50,99."),
        (["--metric-percentiles", "101"], "--metric-percentiles 101: percentiles are from 0 to 100."),
        (["--request-rate", "0"], "--request-rate and --burstiness must be more than 0."),
        (["--header", "x"], "--header x: write KEY=VALUE."),
        (["--base-url", "here"], "--base-url here is not an address such as http://host:port."),
    ],
)
def test_wrong_flags_are_refused_in_a_sentence(
    server: Served, tmp_path: Path, capsys: pytest.CaptureFixture[str], argv: list[str], sentence: str
) -> None:
    assert bench(server, tmp_path, "--num-prompts", "1", *argv) != 0
    assert capsys.readouterr().err == f"pagewire: {sentence}\n"
