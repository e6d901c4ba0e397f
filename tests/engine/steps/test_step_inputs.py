"""The tables, slots and pages of a step over a cache with several groups."""

import numpy as np
import torch

from pagewire.engine.attention.cache_groups import FULL, CacheGroups, Lifetime
from pagewire.engine.steps.rows import Rows
from pagewire.engine.steps.step_inputs import step_inputs
from pagewire.ipc.messages import GroupTable, RowOpen, Sampling, StepPlan, ids_to_bytes

WINDOW = Lifetime("window", 6)
# Full attention takes one page a block, the window two, a state two.
TILES = [(WINDOW, 128), (FULL, 128), (Lifetime("state"), 128), (WINDOW, 128), (Lifetime("state"), 128)]
SIZE = 4
CPU = torch.device("cpu")


def _rows() -> tuple[Rows, CacheGroups]:
    groups = CacheGroups.of(TILES, block_size=SIZE)
    assert [group.pages for group in groups.groups] == [2, 1, 2] and groups.num_tables == 5
    return Rows(num_rows=4, max_len=40, block_size=SIZE, vocab_size=100, groups=groups), groups


def _open(rows: Rows, row: int, *, length: int, num_computed: int, tables: list[tuple[int, list[int]]]) -> None:
    """tables: of the window and of full attention: the first block, and the pages."""
    ids, groups = ids_to_bytes(list(range(length))), tuple(GroupTable(f, ids_to_bytes(pages)) for f, pages in tables)
    rows.open(RowOpen(row, ids, length, num_computed, b"", Sampling(temperature=0), tables=groups))


def _plan(rows: list[int], counts: list[int]) -> StepPlan:
    return StepPlan(1, (), b"", b"", ids_to_bytes(rows), ids_to_bytes(counts), bytes(len(rows)))


def test_every_shelf_of_every_group_has_a_table_and_slots():
    rows, _ = _rows()
    _open(rows, 2, length=9, num_computed=0, tables=[(0, [10, 20, 11, 21]), (0, [30, 31])])
    pages, groups = ids_to_bytes([12, 22, 32]), ids_to_bytes([0, 1])
    rows.grow(StepPlan(1, (), ids_to_bytes([2, 2]), pages, b"", b"", b"", grow_groups=groups))
    rows.set_state(2, 2, [40, 50], [])
    step = step_inputs(_plan([2], [9]), rows, np.zeros(0, np.int64), block_size=SIZE, device=CPU)
    assert step.attention.tables[:3, 0].tolist() == [[10, 11, 12], [20, 21, 22], [30, 31, 32]]
    slots = step.attention.slots
    assert slots.is_contiguous()
    assert [slots[table, [0, 3, 4, 8]].tolist() for table in range(3)] == [
        [40, 43, 44, 48], [80, 83, 84, 88], [120, 123, 124, 128]
    ]  # fmt: skip
    assert step.fresh_pages is not None and sorted(step.fresh_pages.tolist()) == [12, 22, 32]
    assert step.attention.states is not None
    assert step.attention.states[3:, 0].tolist() == [[-1, 40], [-1, 50]], "the first pass begins with zeros"
    rows.keep_states(step.rows)
    rows.num_computed[2] = 9
    assert list(rows.pages_of_block(2, 1)) == [(0, 11), (1, 21), (2, 31)]


def test_a_pass_reads_the_state_that_the_one_before_wrote():
    rows, _ = _rows()
    for row, source in ((0, [7, 8]), (3, [])):
        window, full = list(range(10 * row, 10 * row + 6)), list(range(50 + 10 * row, 53 + 10 * row))
        _open(rows, row, length=12, num_computed=8, tables=[(0, window), (0, full)])
        rows.set_state(row, 2, [40 + row, 44 + row], source)
    step = step_inputs(_plan([3, 0], [1, 2]), rows, np.zeros(0, np.int64), block_size=SIZE, device=CPU)
    assert step.rows.tolist() == [3, 0] and step.attention.states is not None
    assert step.attention.states[3:].tolist() == [[[-1, 43], [7, 40]], [[-1, 47], [8, 44]]]
    rows.keep_states(step.rows)
    step = step_inputs(_plan([0], [1]), rows, np.zeros(0, np.int64), block_size=SIZE, device=CPU)
    assert step.attention.states is not None and step.attention.states[3:, 0].tolist() == [[40, 40], [44, 44]]


def test_released_blocks_are_a_hole_at_the_beginning_of_the_table():
    rows, _ = _rows()
    _open(rows, 1, length=20, num_computed=18, tables=[(3, [10, 20, 11, 21]), (0, [30, 31, 32, 33, 34])])
    rows.set_state(1, 2, [40, 41], [42, 43])
    assert rows.num_positions(np.array([1])).tolist() == [20]
    step = step_inputs(_plan([1], [2]), rows, np.zeros(0, np.int64), block_size=SIZE, device=CPU)
    assert step.attention.tables[:2, 0, 3:].tolist() == [[10, 11], [20, 21]]
    assert step.attention.slots[:3].tolist() == [[46, 47], [86, 87], [138, 139]]
    assert step.fresh_pages is None, "the step fills its last block"


def test_a_model_with_one_group_has_one_table():
    rows = Rows(num_rows=2, max_len=40, block_size=SIZE, vocab_size=100)
    rows.open(RowOpen(1, ids_to_bytes([5, 6, 7]), 3, 0, ids_to_bytes([9]), Sampling(temperature=0)))
    step = step_inputs(_plan([1], [3]), rows, np.zeros(0, np.int64), block_size=SIZE, device=CPU)
    assert (step.attention.tables.tolist(), step.attention.slots.tolist()) == ([[[9]]], [[36, 37, 38]])
    assert step.attention.states is None
    assert step.fresh_pages is not None and step.fresh_pages.tolist() == [9]
