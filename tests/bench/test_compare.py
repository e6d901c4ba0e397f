"""`bench.compare` runs a benchmark of two checkouts in alternation."""

import json
from pathlib import Path

import pytest

from pagewire.bench.compare import main

ROOT = Path(__file__).parents[2]


def test_both_checkouts_are_measured_and_their_ratio_is_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "rows.json"
    benchmark = ("bench.engine.scheduler", "--rows", "4", "--steps", "5", "--repeat", "1")
    main([str(ROOT), str(ROOT), *benchmark, "--rounds", "2", "--json", str(output)])
    assert "4 rows, second / first" in capsys.readouterr().out
    rows = {row["name"]: row["figures"] for row in json.loads(output.read_text())["rows"]}
    first, second = rows["4 rows, first"]["plan µs"], rows["4 rows, second"]["plan µs"]
    assert len(first) == len(second) == 2
    assert rows["4 rows, second / first"]["plan µs"] == [pytest.approx(sum(second) / sum(first))]
