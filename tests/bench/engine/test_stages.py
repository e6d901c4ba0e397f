"""What shares are worth in virtual time, where every figure is exact."""

import pytest

from pagewire.bench.engine.stages import AllEligible, Machine, measure
from pagewire.engine.core.micro_batches import MicroBatches

COSTS = Machine(num_stages=4, step_ms=20.0, row_ms=0.5, prompt_ms=0.0, hop_ms=0.0)


def test_one_request_leaves_all_stages_but_one_idle() -> None:
    figures = measure(COSTS, 1, 60, MicroBatches, is_batch=True)
    assert figures["bubble %"] == pytest.approx(75, abs=1) and figures["ITL p99 ms"] == pytest.approx(20.5, rel=0.01)


@pytest.mark.parametrize("num", [8, 64])
def test_shares_keep_the_stages_busy_with_rows_that_come_together(num: int) -> None:
    figures = measure(COSTS, num, 60, MicroBatches, is_batch=True)
    all_eligible = measure(COSTS, num, 60, AllEligible, is_batch=True)
    assert figures["bubble %"] < 4 and all_eligible["bubble %"] > 70
    assert figures["ITL p99 ms"] == pytest.approx(20 + 0.5 * num / 4, rel=0.02)
    assert figures["tokens/s"] > (1.1 if num == 8 else 1.7) * all_eligible["tokens/s"]
