"""A row's recurrent state after a step with draft tokens is that of the accepted tokens."""

import numpy as np
import pytest
import torch

from pagewire.engine.attention.kv_cache import KvCache, KvShape, StateTile, Tile
from pagewire.engine.steps.draft_states import DraftStates, within
from pagewire.engine.steps.rows import Rows
from pagewire.engine.steps.step_inputs import StepInputs, step_inputs
from pagewire.ipc.messages import GroupTable, RowOpen, Sampling, StepPlan, ids_to_bytes
from pagewire.kernels.reference_scans import scan_lightning

SIZE, DIM, NUM_DRAFTS = 16, 8, 3
SHAPE = KvShape(layers=(Tile(1, 4, 4),), dtype=torch.float32, states=(StateTile((1, DIM, DIM)),) * 3)
EMBEDDINGS = torch.randn(64, 3, DIM, generator=torch.Generator().manual_seed(0))
DECAY = torch.tensor([0.5, 0.7, 0.9])


def _scan(cache: KvCache, step: StepInputs) -> None:
    x = EMBEDDINGS[step.ids]
    assert step.attention.states is not None
    scan_lightning(x, x, x, DECAY, step.attention.states, cache.state_tiles(0, 3, 1))


def _state(cache: KvCache, pages: list[int]) -> torch.Tensor:
    return cache.state_tiles(0, 3, 1).load(cache.storage, pages, (3, DIM, DIM))


def _open(rows: Rows, cache: KvCache, row: int, ids: list[int]) -> list[int]:
    """A row whose prompt is to be computed. Returns its pages: a block, and its state."""
    num = 1 + cache.groups.state_pages
    block, *state = range(row * num, (row + 1) * num)
    table = GroupTable(0, ids_to_bytes([block]))
    rows.open(RowOpen(row, ids_to_bytes(ids), 4, 0, b"", Sampling(), tables=(table,), state=ids_to_bytes(state)))
    return state


def _plan(rows: list[int], counts: list[int], num_speculative: int = 0) -> StepPlan:
    return StepPlan(
        1, (), b"", b"", ids_to_bytes(rows), ids_to_bytes(counts), b"\1" * len(rows),
        num_speculative=num_speculative, speculate=NUM_DRAFTS,
    )  # fmt: skip


def _pass(cache: KvCache, rows: Rows, plan: StepPlan) -> None:
    """Without draft tokens; samples nothing."""
    step = step_inputs(plan, rows, np.zeros(0, np.int64), cache=cache)
    _scan(cache, step)
    rows.num_computed[step.rows] += step.counts
    rows.advance_states(step.rows)


@pytest.mark.parametrize("accepted", [(0, 0), (1, 3), (3, 2), (3, 3)])
def test_the_state_is_that_of_the_accepted_tokens(accepted: tuple[int, int]) -> None:
    """Rows 0 and 2 have draft tokens, rows 1 and 3 have none; row 3 is in the midst of its prompt."""
    torch.manual_seed(1)
    cache = KvCache(shape=SHAPE, num_pages=16, block_size=SIZE, device=torch.device("cpu"), num_spares=2 * NUM_DRAFTS)
    cache.storage[: cache.zero_page] = 255  # NaN
    assert cache.groups.state_pages > 1 and cache.spare_states.min() == 16
    rows = Rows(num_rows=4, max_len=15, block_size=SIZE, vocab_size=64, groups=cache.groups)
    states = [_open(rows, cache, row, [row, 5, 6, 7 + row]) for row in range(4)]
    _pass(cache, rows, _plan([1, 0, 2, 3], [3, 3, 3, 2]))
    text = {row: [10 * row + i for i in range(NUM_DRAFTS + 1)] for row in (0, 2)}  # what the model samples
    for row, num in zip((0, 2), accepted, strict=True):
        rows.ids[row, 4 : 4 + NUM_DRAFTS] = [*text[row][:num], *[63] * NUM_DRAFTS][:NUM_DRAFTS]

    plan, draft_tokens = _plan([0, 1, 2, 3], [1, 1, 1, 2], 3), np.array([NUM_DRAFTS, 0, NUM_DRAFTS])
    drafts = DraftStates.of(plan, rows, draft_tokens, cache.spare_states)
    step = step_inputs(plan, rows, draft_tokens, cache=cache, draft_states=drafts)
    _scan(cache, step)
    rows.num_computed[step.rows] += step.counts
    rows.advance_states(step.rows)
    samples = step.sampled
    ids = [text[row][end - 4] if row in text else 9 for row, end in zip(samples.rows, samples.ends, strict=True)]
    rows.append(samples.rows, samples.ends, np.array(ids))
    if (copies := drafts.copies(rows)) is not None:
        cache.copy(*copies)

    for row, num in ((0, accepted[0]), (1, 0), (2, accepted[1]), (3, 0)):
        fed = rows.ids[row, : 4 + num].tolist()
        assert rows.num_computed[row] == len(fed)
        assert rows.ids[row, len(fed)] == (text[row][num] if row in text else 9)
        alone = KvCache(shape=SHAPE, num_pages=16, block_size=SIZE, device=torch.device("cpu"))
        others = Rows(num_rows=4, max_len=15, block_size=SIZE, vocab_size=64, groups=alone.groups)
        pages = _open(others, alone, 0, fed)
        for _ in fed:
            _pass(alone, others, _plan([0], [1]))
        ours, expected = _state(cache, states[row]), _state(alone, pages)
        assert torch.equal(ours, expected) and expected.any(), f"row {row}"


def test_the_first_rows_have_draft_tokens_while_there_are_spare_states() -> None:
    assert within(np.array([0, 4, 0, 4, 4]), 8).tolist() == [0, 4, 0, 4, 0]
    assert within(np.array([4, 4]), 3).tolist() == [0, 0]


def test_without_spare_states_no_row_has_draft_tokens() -> None:
    cache = KvCache(shape=SHAPE, num_pages=16, block_size=SIZE, device=torch.device("cpu"))
    rows = Rows(num_rows=4, max_len=15, block_size=SIZE, vocab_size=64, groups=cache.groups)
    _open(rows, cache, 0, [1, 2, 3, 4])
    _pass(cache, rows, _plan([0], [3]))
    plan, draft_tokens = _plan([0], [1], 1), within(np.array([NUM_DRAFTS]), len(cache.spare_states))
    drafts = DraftStates.of(plan, rows, draft_tokens, cache.spare_states)
    step = step_inputs(plan, rows, draft_tokens, cache=cache, draft_states=drafts)
    assert step.attention.states is not None and not len(step.attention.states.keep_rows)
    assert step.counts.tolist() == [1] and drafts.copies(rows) is None
