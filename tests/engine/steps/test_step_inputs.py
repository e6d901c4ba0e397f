"""The tables, slots and pages of a step over a cache with several groups."""

import numpy as np
import pytest
import torch

from pagewire.engine.attention.cache_groups import Lifetime
from pagewire.engine.attention.kv_cache import KvCache, KvShape, StateTile, Tile
from pagewire.engine.steps.rows import Rows
from pagewire.engine.steps.step_inputs import step_inputs
from pagewire.ipc.messages import GroupTable, RowOpen, Sampling, StepPlan, ids_to_bytes

WINDOW = Lifetime("window", 6)
# Full attention takes one page a block, the window two, a state two.
LAYERS = (Tile(1, 4, 4, WINDOW), Tile(1, 4, 4), Tile(1, 4, 4, WINDOW))
HYBRID = KvShape(layers=LAYERS, dtype=torch.float32, states=(StateTile((1, 4, 8)), StateTile((2, 4, 4))))
SIZE = 4
NONE = np.zeros(0, np.int64)


def _rows(shape: KvShape = HYBRID) -> tuple[Rows, KvCache]:
    cache = KvCache(shape=shape, num_pages=60, block_size=SIZE, device=torch.device("cpu"))
    return Rows(num_rows=4, max_len=40, block_size=SIZE, vocab_size=100, groups=cache.groups), cache


def _open(
    rows: Rows,
    row: int,
    *,
    length: int,
    num_computed: int,
    tables: list[tuple[int, list[int]]],
    state: tuple[int, int] = (40, 50),
    source: tuple[int, ...] = (),
) -> None:
    """tables: of the window and of full attention: the first block, and the pages. state, source: pages."""
    ids, groups = ids_to_bytes(list(range(length))), tuple(GroupTable(f, ids_to_bytes(pages)) for f, pages in tables)
    rows.open(
        RowOpen(
            row, ids, length, num_computed, b"", Sampling(temperature=0), tables=groups,
            state=ids_to_bytes(state), state_from=ids_to_bytes(source),
        )
    )  # fmt: skip


def _plan(rows: list[int], counts: list[int], keeps: list[tuple[int, int, list[int]]] | None = None) -> StepPlan:
    """keeps: row, position, pages."""
    kept = keeps or []
    return StepPlan(
        1, (), b"", b"", ids_to_bytes(rows), ids_to_bytes(counts), bytes(len(rows)),
        keep_rows=ids_to_bytes([row for row, _, _ in kept]),
        keep_positions=ids_to_bytes([position for _, position, _ in kept]),
        keep_pages=ids_to_bytes([page for _, _, pages in kept for page in pages]),
    )  # fmt: skip


def test_every_shelf_of_every_group_has_a_table_and_slots():
    rows, cache = _rows()
    assert [group.pages for group in cache.groups.groups] == [2, 1, 2] and rows.tables.shape[0] == 3
    _open(rows, 2, length=9, num_computed=0, tables=[(0, [10, 20, 11, 21]), (0, [30, 31])])
    pages, groups = ids_to_bytes([12, 22, 32]), ids_to_bytes([0, 1])
    rows.grow(StepPlan(1, (), ids_to_bytes([2, 2]), pages, b"", b"", b"", grow_groups=groups))
    step = step_inputs(_plan([2], [9]), rows, NONE, cache=cache)
    assert step.attention.tables[:3, 0].tolist() == [[10, 11, 12], [20, 21, 22], [30, 31, 32]]
    slots = step.attention.slots
    assert slots.is_contiguous()
    assert [slots[table, [0, 3, 4, 8]].tolist() for table in range(3)] == [
        [40, 43, 44, 48], [80, 83, 84, 88], [120, 123, 124, 128]
    ]  # fmt: skip
    assert step.fresh_pages is not None and sorted(step.fresh_pages.tolist()) == [12, 22, 32]
    rows.num_computed[2] = 9
    assert list(rows.pages_of_block(2, 1)) == [(0, 11), (1, 21), (2, 31)]


def _two_rows() -> tuple[Rows, KvCache]:
    """Row 0 begins with a state in the pages 7 and 8, row 3 with zeros."""
    rows, cache = _rows()
    for row, source in ((0, (7, 8)), (3, ())):
        window, full = list(range(10 * row, 10 * row + 6)), list(range(50 + 10 * row, 53 + 10 * row))
        tables = [(0, window), (0, full)]
        _open(rows, row, length=12, num_computed=8, tables=tables, state=(40 + row, 44 + row), source=source)
    return rows, cache


def test_a_pass_reads_the_state_that_the_one_before_wrote():
    rows, cache = _two_rows()
    step = step_inputs(_plan([0, 3], [2, 1]), rows, NONE, cache=cache)
    states = step.attention.states
    assert step.rows.tolist() == [3, 0] and states is not None and states.memory is cache.storage
    assert states.counts.tolist() == [1, 2], "in step order, decode rows first"
    assert (states.read.tolist(), states.written.tolist()) == ([[-1, -1], [7, 8]], [[43, 47], [40, 44]])
    assert not len(states.keep_rows)
    rows.advance_states(step.rows)
    states = step_inputs(_plan([0], [1]), rows, NONE, cache=cache).attention.states
    assert states is not None and states.read.tolist() == states.written.tolist() == [[40, 44]]


def test_states_are_kept_in_the_midst_of_a_pass():
    rows, cache = _two_rows()
    keeps = [(3, 12, [20, 21]), (0, 9, [22, 23]), (3, 9, [24, 25])]
    states = step_inputs(_plan([3, 0], [4, 1], keeps), rows, NONE, cache=cache).attention.states
    assert states is not None and states.counts.tolist() == [1, 4]
    assert [part.tolist() for part in (states.keep_rows, states.keep_counts, states.keep_pages)] == [
        [0, 1, 1], [1, 1, 4], [[22, 23], [24, 25], [20, 21]]
    ]  # fmt: skip
    with pytest.raises(AssertionError, match="keeps states of no pass"):
        step_inputs(_plan([3], [3], [(3, 12, [20, 21])]), rows, NONE, cache=cache)


def test_released_blocks_are_a_hole_at_the_beginning_of_the_table():
    rows, cache = _rows()
    _open(rows, 1, length=20, num_computed=18, tables=[(3, [10, 20, 11, 21]), (0, [30, 31, 32, 33, 34])])
    assert rows.num_positions(np.array([1])).tolist() == [20]
    step = step_inputs(_plan([1], [2]), rows, NONE, cache=cache)
    assert step.attention.tables[:2, 0, 3:].tolist() == [[10, 11], [20, 21]]
    assert step.attention.slots[:3].tolist() == [[46, 47], [86, 87], [138, 139]]
    assert step.fresh_pages is None, "the step fills its last block"


def test_a_model_with_one_group_has_one_table():
    rows, cache = _rows(KvShape.uniform(num_layers=2, kv_heads=1, head_dim=4, dtype=torch.float32))
    rows.open(RowOpen(1, ids_to_bytes([5, 6, 7]), 3, 0, ids_to_bytes([9]), Sampling(temperature=0)))
    step = step_inputs(_plan([1], [3]), rows, NONE, cache=cache)
    assert (step.attention.tables.tolist(), step.attention.slots.tolist()) == ([[[9]]], [[36, 37, 38]])
    assert step.attention.states is None
    assert step.fresh_pages is not None and step.fresh_pages.tolist() == [9]


def test_each_token_has_the_regime_of_its_row():
    rows, cache = _rows(KvShape.uniform(num_layers=2, kv_heads=1, head_dim=4, dtype=torch.float32))
    for row, regime in ((0, 0), (1, 1)):
        ids, block = ids_to_bytes([5, 6, 7]), ids_to_bytes([row])
        rows.open(RowOpen(row, ids, 3, 0, block, Sampling(temperature=0), regime=regime))
    regimes = step_inputs(_plan([0, 1], [2, 3]), rows, NONE, cache=cache).regimes
    assert regimes is not None and regimes.tolist() == [0, 0, 1, 1, 1]
    assert step_inputs(_plan([0], [2]), rows, NONE, cache=cache).regimes is None
