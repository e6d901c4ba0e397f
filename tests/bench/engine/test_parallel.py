"""The benchmark of stages and ranks starts what its sizes say, and measures each."""

import json
from pathlib import Path

import checkpoints
import pytest
import vocabulary

from pagewire.bench.engine import parallel
from pagewire.bench.engine.parallel import _Size


@pytest.mark.parametrize(
    ("text", "name", "flags"),
    [
        ("2x3", "2 × 3", {}),
        ("1x2x2", "1 × 2 domains", {"kv_domains": 2}),
        ("2x2+experts", "2 × 2, whole experts", {"enable_expert_parallel": True}),
        (
            "1x2x2+all-to-all",
            "1 × 2 domains, all-to-all",
            {"kv_domains": 2, "enable_expert_parallel": True, "all2all_backend": "all-to-all"},
        ),
    ],
)
def test_a_size_is_an_engines_settings(text: str, name: str, flags: dict[str, object]) -> None:
    size = _Size.of(text)
    sizes = {"pipeline_parallel_size": int(text[0]), "tensor_parallel_size": int(text[2]), "kv_domains": 1}
    assert (size.name, size.flags) == (name, sizes | flags)


@pytest.mark.e2e
@pytest.mark.slow
def test_a_small_run_measures_whole_experts_in_stages(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    folder = vocabulary.add_tokenizer(checkpoints.make_checkpoint(tmp_path / "model", "qwen3_moe"))
    file = tmp_path / "parallel.json"
    requests = ["--num-prompts", "2", "--input-len", "8", "--output-len", "64", "--repeat", "1"]
    parallel.main(["--model", str(folder), "--sizes", "1x1,2x2+experts", *requests, "--json", str(file)])
    rows = {row["name"]: row["figures"] for row in json.loads(file.read_text())["rows"]}
    assert list(rows) == ["1 × 1", "2 × 2, whole experts"]
    assert all(figures["tok/s"][0] > 0 for figures in rows.values()) and rows["1 × 1"]["ratio"] == [1.0]
    assert [name for name, figures in rows.items() if "kB/token" in figures] == ["2 × 2, whole experts"]
    assert rows["2 × 2, whole experts"]["kB/token"][0] > 0
    assert "whole experts" in capfd.readouterr().out
