"""Where the states of rows lie, and the order in which a step reads and writes them."""

import pytest
import torch

from pagewire.kernels.states import Segment, StateRows, Tiles, grouped


def rows(counts, read, written, keeps):
    return StateRows.of(torch.zeros(8, 64, dtype=torch.uint8), counts, read, written, keeps)


def test_a_row_is_cut_where_its_state_is_kept():
    step = rows([3, 0, 5], [[1], [-1], [2]], [[1], [3], [-1]], [(2, 4, [5]), (0, 3, [6]), (2, 1, [4])])
    assert list(step.segments()) == [
        Segment(0, 3, [1], [6]),
        Segment(3, 3, None, [1]),
        Segment(3, 3, [-1], [3]),
        Segment(3, 4, [2], [4]),
        Segment(4, 7, None, [5]),
        Segment(7, 8, None, [-1]),
    ]


def test_a_state_can_be_kept_only_within_a_rows_tokens():
    with pytest.raises(AssertionError, match="outside of"):
        rows([3], [[1]], [[1]], [(0, 4, [2])])


def test_a_step_without_rows():
    step = rows([], [], [], [])
    assert list(step.segments()) == [] and step.keep_pages.shape == (0, 0)


def test_tiles_lie_in_several_pages():
    memory = torch.zeros(6, 40, dtype=torch.uint8)
    tiles = Tiles(torch.tensor([0, 1], dtype=torch.int32), torch.tensor([8, 0]), per_tile=2)
    states = torch.arange(12.0).view(3, 2, 2)  # the last tile has one unit of two
    tiles.store(memory, [4, 2], states)
    assert torch.equal(tiles.load(memory, [4, 2], (3, 2, 2)), states)
    assert torch.equal(memory[4, 8:40].view(torch.float32), torch.arange(8.0))
    assert torch.equal(memory[2, :16].view(torch.float32), torch.arange(8.0, 12.0))
    assert not memory[[0, 1, 3, 5]].any() and not memory[4, :8].any() and not memory[2, 16:].any()


def test_pages_that_are_not_there_are_zeros():
    memory = torch.full((2, 16), 7, dtype=torch.uint8)
    tiles = Tiles(torch.tensor([0], dtype=torch.int32), torch.tensor([0]), per_tile=1)
    assert not tiles.load(memory, [-1], (1, 4)).any()
    tiles.store(memory, [-1], torch.ones(1, 4))
    assert (memory == 7).all()


def test_grouped_pads_the_last_channels():
    weight = torch.randn(20, 3)
    result = grouped(weight)
    assert result.shape == (2, 3, 16)
    assert torch.equal(result.transpose(1, 2).reshape(32, 3)[:20], weight)
    assert not result[1, :, 4:].any()
