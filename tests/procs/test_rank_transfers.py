"""A transfer of KV is over when it is on every rank."""

from random import Random
from typing import Any

import pytest

from pagewire.ipc.messages import Transferred, bytes_to_ids, ids_to_bytes
from pagewire.procs.rank_transfers import RankTransfers


def ended(
    rank: int, *loaded: int, failed: tuple[int, ...] = (), sent: tuple[int, ...] = (), blocks: int = 0
) -> Transferred:
    return Transferred(loaded, ids_to_bytes(list(failed)), sent, blocks, 2.0 * blocks, rank)


def test_one_rank_reports_for_itself() -> None:
    message = ended(0, 7, failed=(3,))
    assert RankTransfers(1).add(message) is message


def test_a_load_is_over_with_the_last_rank_and_fails_with_any() -> None:
    transfers = RankTransfers(3)
    assert transfers.add(ended(0, 7, 8, blocks=4)) is None
    assert transfers.add(ended(2, 8, failed=(5,), sent=(9,), blocks=2)) is None
    assert transfers.is_partial
    over = transfers.add(ended(1, 8, failed=(6,), blocks=3))
    assert over is not None and over.loaded == (8,) and over.sent == ()
    assert list(bytes_to_ids(over.failed_blocks)) == [5, 6]
    assert (over.num_blocks, over.load_ms) == (3, 6.0)  # of the slowest rank
    assert transfers.add(ended(1, 7, sent=(9,))) is None
    last = transfers.add(ended(2, 7))
    assert last is not None and last.loaded == (7,) and not last.failed_blocks and last.num_blocks == 4
    whole = transfers.add(ended(0, sent=(9,)))
    assert whole is not None and whole.sent == (9,) and whole.loaded == ()
    assert not transfers.is_partial


def history(seed: int) -> None:
    """Ranks load blocks at their own pace, in messages that end several loads at once. Raises AssertionError if the
    core hears of a load before it is over everywhere, twice, never, or without a block that failed."""
    rng = Random(seed)
    num_ranks, rids = rng.randint(2, 4), list(range(rng.randint(1, 12)))
    left = [rng.sample(rids, len(rids)) for _ in range(num_ranks)]
    failed = {(rank, rid) for rank in range(num_ranks) for rid in rids if rng.random() < 0.1}
    transfers, told = RankTransfers(num_ranks), set[int]()
    while any(left):
        rank = rng.choice([rank for rank in range(num_ranks) if left[rank]])
        ended_now = [left[rank].pop() for _ in range(min(len(left[rank]), rng.randint(1, 3)))]
        bad = tuple(10 * rid for rid in ended_now if (rank, rid) in failed)
        over = transfers.add(ended(rank, *ended_now, failed=bad, blocks=len(ended_now)))
        for rid in () if over is None else over.loaded:
            assert rid not in told and not any(rid in others for others in left), (
                f"seed {seed}: {rid} is loaded too early"
            )
            told.add(rid)
            assert over is not None
            is_bad = any((one, rid) in failed for one in range(num_ranks))
            assert (10 * rid in bytes_to_ids(over.failed_blocks)) >= is_bad, f"seed {seed}: a failure of {rid} is lost"
    assert told == set(rids) and not transfers.is_partial, f"seed {seed}: not all were told"


def test_random_histories_of_ranks() -> None:
    for seed in range(300):
        history(seed)


@pytest.mark.parametrize("mutant", ["over after the first rank", "the last rank's failures only", "forgets nothing"])
def test_a_history_finds_each_mutant(mutant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    take = RankTransfers._take

    def first_rank(self: RankTransfers, ended: dict[int, Any]) -> dict[int, Any]:
        over = dict(ended)
        ended.clear()
        return over

    def last_failures(self: RankTransfers, message: Transferred) -> Transferred | None:
        for load in self._loads.values():
            load.failed = set()
        return add(self, message)

    def keep(self: RankTransfers, ended: dict[int, Any]) -> dict[int, Any]:
        return {rid: one for rid, one in ended.items() if rid in take(self, dict(ended))}

    add = RankTransfers.add
    if mutant.startswith("over"):
        monkeypatch.setattr(RankTransfers, "_take", first_rank)
    elif mutant.startswith("the last"):
        monkeypatch.setattr(RankTransfers, "add", last_failures)
    else:
        monkeypatch.setattr(RankTransfers, "_take", keep)
    with pytest.raises(AssertionError):
        for seed in range(300):
            history(seed)


def test_what_was_reported_of_ranks_that_died_does_not_count() -> None:
    transfers = RankTransfers(2)
    transfers.add(ended(0, 7))
    transfers.forget()
    assert not transfers.is_partial
    assert transfers.add(ended(1, 7)) is None
