"""A transfer of KV is over when it is on every rank."""

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


def test_what_was_reported_of_ranks_that_died_does_not_count() -> None:
    transfers = RankTransfers(2)
    transfers.add(ended(0, 7))
    transfers.forget()
    assert not transfers.is_partial
    assert transfers.add(ended(1, 7)) is None
