"""Random histories keep every invariant, cover every kind of event, and fail for every mutant.

A thousand histories run here. `python -m tests.sim` runs ten thousand, which a change of the engine's core should
pass."""

from collections import Counter

import pytest

from .history import History
from .mutants import MUTANTS, MUTANTS_OF_ENCODERS, MUTANTS_OF_STAGES, mutated

NUM_BATCHES, BATCH = 1, 1000
MUTANT_SEEDS = 4000
# Histories that show what hardly any history does. They are tried first.
SHOWN_BY = {
    "a row goes on behind a released block": (1195,),
    "a share holds a request back for ever": (275,),
    "a share holds a request back too long": (3203,),
}
NUM_OF_STAGES = 40
STAGES = (2, 3, 4)  # in turn
NUM_WITH_ENCODER = 60

# Events that must happen at least so often in every batch; otherwise the histories no longer test them.
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
    "completed grammars": 200,
    "draft tokens": 2500,
    "draft tokens accepted": 1200,
    "late rows": 4000,
    "late": 200,
    "loaded states": 10,
    "loads": 100,
    "loads of several groups": 40,
    "failed loads": 25,
    "masks": 5000,
    "overtaken": 50,
    "patience ended": 50,
    "sleeps": 200,
    "sleeps with running requests": 50,
    "plans without rows": 100,
    "preempted": 200,
    "regime changes": 100,
    "regimes, cached tokens": 2000,
    "resumed with output": 40,
    "sends": 100,
    "settings changed": 100,
    "several choices": 1000,
    "several groups": 200,
    "several groups, cached tokens": 1500,
    "states found": 200,
    "states kept": 300,
    "steps after one without memory": 500,
    "steps without memory": 500,
    "stop strings": 100,
    "stored beginnings": 200,
    "stored blocks": 1000,
    "stored states": 300,
    "tenants far ahead": 100,
    "taken back": 300,
    "workers lost at work": 100,
    "workers lost while loading": 1,
}


COVERED_BY_STAGES = {
    "cached tokens": 500,
    "cancelled in flight": 10,
    "constrained": 100,
    "cores lost": 5,
    "draft tokens accepted": 50,
    "masks": 150,
    "preempted": 10,
    "regime changes": 2,
    "sleeps with running requests": 2,
    "states kept": 10,
    "steps of stages without memory": 50,
    "workers lost at work": 5,
}


def replay(seed: int, num_stages: int = 1) -> str:
    return (
        f"history {seed} failed. To see it: PYTHONPATH=.typing python -m tests.sim --stages {num_stages} --seed {seed}"
    )


@pytest.mark.slow
@pytest.mark.parametrize("batch", range(NUM_BATCHES))
def test_every_history_keeps_every_invariant(batch: int) -> None:
    counts: Counter[str] = Counter()
    for seed in range(batch * BATCH, (batch + 1) * BATCH):
        try:
            counts += History(seed).run()
        except Exception as error:
            raise AssertionError(f"{replay(seed)}\n{type(error).__name__}: {error}") from error
    missing = {event: counts[event] for event, num in COVERED.items() if counts[event] < num}
    assert not missing, f"the histories no longer cover this: {missing}"


@pytest.mark.slow
def test_every_history_of_stages_keeps_every_invariant() -> None:
    counts: Counter[str] = Counter()
    for seed in range(NUM_OF_STAGES):
        num_stages = STAGES[seed % len(STAGES)]
        try:
            counts += History(seed, num_stages=num_stages).run()
        except Exception as error:
            raise AssertionError(f"{replay(seed, num_stages)}\n{type(error).__name__}: {error}") from error
    missing = {event: counts[event] for event, num in COVERED_BY_STAGES.items() if counts[event] < num}
    assert not missing, f"the histories no longer cover this: {missing}"


@pytest.mark.slow
@pytest.mark.parametrize("name", MUTANTS_OF_STAGES)
def test_some_history_of_stages_fails_for_each_mutant(name: str) -> None:
    with mutated(name), pytest.raises((AssertionError, KeyError, IndexError, TypeError, ValueError)):
        for seed in range(NUM_OF_STAGES):
            History(seed, num_stages=STAGES[seed % len(STAGES)]).run()


def test_histories_of_models_with_an_encoder() -> None:
    counts: Counter[str] = Counter()
    for seed in range(NUM_WITH_ENCODER):
        counts += History(seed, has_encoder=True).run()
    least = {"prompts read": 300, "prompts found": 100, "preempted": 5, "steps without memory": 50, "copies": 50}
    assert all(counts[event] >= number for event, number in least.items()), counts


@pytest.mark.parametrize("name", MUTANTS_OF_ENCODERS)
def test_some_history_with_an_encoder_fails_for_each_mutant(name: str) -> None:
    with mutated(name), pytest.raises((AssertionError, KeyError, IndexError, TypeError, ValueError)):
        for seed in range(5 * NUM_WITH_ENCODER):
            History(seed, has_encoder=True).run()


@pytest.mark.parametrize("name", MUTANTS)
@pytest.mark.long
def test_some_history_fails_for_each_mutant(name: str) -> None:
    with mutated(name), pytest.raises((AssertionError, KeyError, IndexError, TypeError, ValueError)):
        for seed in (*SHOWN_BY.get(name, ()), *range(MUTANT_SEEDS)):
            History(seed).run()


def test_a_seed_always_gives_the_same_history() -> None:
    logs: list[list[str]] = [[], []]
    for lines in logs:
        for seed in range(20):
            History(seed, log=lines.append, num_stages=3 if seed % 5 == 0 else 1).run()
    assert logs[0] == logs[1] and len(logs[0]) > 500
