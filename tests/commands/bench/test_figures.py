"""Figures of a measured load, computed by hand and by numpy."""

import numpy as np
import pytest

from pagewire.commands.bench.figures import measure, parse_goodput, percentile, table
from pagewire.commands.bench.load import Outcome
from pagewire.errors import ConfigError

OUTCOMES = [
    Outcome(start=10.0, ttft=0.5, latency=1.5, itl=[0.25] * 4, num_prompt=10, num_output=5),
    Outcome(start=10.5, ttft=0.1, latency=0.4, itl=[0.3], num_prompt=20, num_output=2),
    Outcome(start=12.0, ttft=0.2, latency=0.2, num_prompt=5, num_output=1),
    Outcome(start=12.0, error="500: no"),
]


def test_figures_of_known_outcomes() -> None:
    found = measure(OUTCOMES, 4.0, percents=[50, 99], goodput={"ttft": 300, "tpot": 299})
    assert (found["completed"], found["failed"]) == (3, 1)
    assert (found["total_input_tokens"], found["total_output_tokens"]) == (35, 8)
    assert found["request_throughput"] == 0.75 and found["output_throughput"] == 2.0
    assert found["total_token_throughput"] == 43 / 4 and found["max_concurrent_requests"] == 2
    assert found["request_goodput"] == 0.25  # the third; the second has 300 ms for each token
    assert found["mean_ttft_ms"] == pytest.approx(800 / 3) and found["median_ttft_ms"] == pytest.approx(200)
    assert found["mean_tpot_ms"] == pytest.approx((250 + 300) / 2), "one token has no time per token"
    assert found["mean_itl_ms"] == pytest.approx((4 * 250 + 300) / 5)
    assert found["p50_e2el_ms"] == pytest.approx(400)
    # Tokens of the first second after the first request: 5 of the first until 10.999, and both of the second.
    assert found["max_output_tokens_per_s"] == 4.0


@pytest.mark.parametrize("percent", [0, 1, 25, 50, 90, 99, 100])
def test_percentiles_are_those_of_numpy(percent: float) -> None:
    values = [3.0, 1.0, 4.0, 1.5, 9.0, 2.6]
    assert percentile(values, percent) == pytest.approx(np.percentile(values, percent))
    assert percentile([], percent) == 0.0


def test_nothing_succeeded() -> None:
    found = measure(OUTCOMES[3:], 1.0, percents=[99], goodput={})
    assert found["completed"] == 0 and found["p99_ttft_ms"] == 0.0 and found["request_goodput"] is None


def test_the_table_has_vllms_lines() -> None:
    found = {**measure(OUTCOMES, 4.0, percents=[99], goodput={}), "request_rate": "inf", "max_concurrency": 2}
    lines = table(found, ["ttft"], [99]).splitlines()
    assert lines[0] == "============ Serving Benchmark Result ============" and lines[-1] == "=" * 50
    assert (
        "Successful requests:                     3" in lines and "Maximum request concurrency:             2" in lines
    )
    assert "Mean TTFT (ms):                          266.67" in lines and "P99 TTFT (ms):" in "".join(lines)
    assert not [line for line in lines if "goodput" in line or "rate configured" in line]


def test_goodput() -> None:
    assert parse_goodput(["ttft:100", "e2el:2.5"]) == {"ttft": 100.0, "e2el": 2.5}
    for wrong in ("ttft", "ttft:soon", "speed:3"):
        with pytest.raises(ConfigError, match=f"--goodput {wrong}: write ttft:100"):
            parse_goodput([wrong])
