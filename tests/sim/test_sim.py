"""Random histories keep every invariant, cover what they claim to cover, and notice every mutant.

A thousand here; `python -m tests.sim` plays ten thousand, which a change of the engine's core should pass."""

from collections import Counter

import pytest

from .history import History
from .mutants import MUTANTS, mutated

NUM_BATCHES, BATCH = 1, 1000
MUTANT_SEEDS = 2000

# What must happen how often in every batch, or the histories have become too tame to prove anything.
COVERED = {
    "cached tokens": 10_000,
    "cancelled in flight": 100,
    "cancelled while loading": 5,
    "copies": 500,
    "constrained": 2000,
    "cores lost": 100,
    "ended by internal": 100,
    "ended by queue_full": 100,
    "ended by stop": 500,
    "ended by unavailable": 100,
    "grammars that are complete": 200,
    "draft tokens": 3000,
    "draft tokens accepted": 1200,
    "loads": 150,
    "loads that failed": 25,
    "masks": 5000,
    "naps": 200,
    "naps at work": 50,
    "plans without rows": 100,
    "preempted": 200,
    "resumed with output": 40,
    "sends": 100,
    "several choices": 1000,
    "steps after one without memory": 500,
    "steps without memory": 500,
    "stop strings": 100,
    "stored blocks": 1000,
    "tenants far ahead": 100,
    "workers lost at work": 100,
    "workers lost while loading": 1,
}


def replay(seed: int) -> str:
    return f"history {seed} failed. To see it: PYTHONPATH=.typing python -m tests.sim --seed {seed}"


@pytest.mark.slow
@pytest.mark.parametrize("batch", range(NUM_BATCHES))
def test_every_history_keeps_every_invariant(batch: int) -> None:
    seen: Counter[str] = Counter()
    for seed in range(batch * BATCH, (batch + 1) * BATCH):
        try:
            seen += History(seed).run()
        except Exception as error:
            raise AssertionError(f"{replay(seed)}\n{type(error).__name__}: {error}") from error
    missing = {what: seen[what] for what, num in COVERED.items() if seen[what] < num}
    assert not missing, f"the histories no longer cover this: {missing}"


@pytest.mark.parametrize("name", MUTANTS)
@pytest.mark.long
def test_each_mutant_is_noticed(name: str) -> None:
    with mutated(name), pytest.raises((AssertionError, KeyError, IndexError, TypeError, ValueError)):
        for seed in range(MUTANT_SEEDS):
            History(seed).run()


def test_a_seed_gives_one_history() -> None:
    told: list[list[str]] = [[], []]
    for lines in told:
        for seed in range(20):
            History(seed, tell=lines.append).run()
    assert told[0] == told[1] and len(told[0]) > 500
