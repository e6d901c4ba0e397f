"""`pagewire bench throughput`, `latency` and `startup` with the demo model."""

import json
from pathlib import Path

import pytest

from pagewire.cli import main


def figures(path: Path) -> dict[str, object]:
    found: dict[str, object] = json.loads(path.read_text())
    return found


@pytest.mark.slow
def test_throughput_and_latency(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "figures.json"
    common = ["--threads", "1", "--kv-cache-memory", "32M", "--disable-tqdm", "--output-json", str(out)]
    argv = ["--num-prompts", "4", "--input-len", "12", "--output-len", "5", "--n", "2", "--num-warmups", "1"]
    assert main(["bench", "throughput", *argv, "--enforce-eager", "--dtype", "float", *common]) == 0
    printed = capsys.readouterr()
    assert "Total num output tokens:  40\n" in printed.out and "--enforce-eager is not needed" in printed.err
    found = figures(out)
    assert found["num_requests"] == 4 and isinstance(found["total_num_tokens"], int) and found["total_num_tokens"] > 40

    argv = ["--input-len", "6", "--output-len", "3", "--batch-size", "2", "--num-iters-warmup", "1", "--num-iters", "3"]
    assert main(["bench", "latency", "--model", "demo", *argv, *common]) == 0
    found = figures(out)
    latencies = found["latencies"]
    assert (
        isinstance(latencies, list)
        and len(latencies) == 3
        and found["avg_latency"] == pytest.approx(sum(latencies) / 3)
    )
    assert "99% percentile latency: " in capsys.readouterr().out


@pytest.mark.e2e
def test_startup(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "figures.json"
    numbers = ["--num-iters-cold", "0", "--num-iters-warmup", "0", "--num-iters-warm", "1"]
    assert main(["bench", "startup", *numbers, "--threads", "1", "--disable-tqdm", "--output-json", str(out)]) == 0
    assert "Avg warm startup time: " in capsys.readouterr().out and "avg_cold_startup_time" not in figures(out)
    assert main(["bench", "startup", *numbers, "/nowhere/model", "--disable-tqdm"]) == 1
    assert "nowhere" in capsys.readouterr().err


def test_lengths_are_checked_before_a_model_is_loaded(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "latency", "--input-len", "0"]) == 2
    assert capsys.readouterr().err == "pagewire: Lengths and numbers must be at least 1.\n"
