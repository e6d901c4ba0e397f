"""Prompt lookup against its definition, and how draft levels rise and fall."""

import random

import numpy as np
import pytest

from pagewire.engine.steps.ngram import draft, find, learn
from pagewire.engine.steps.rows import Rows
from pagewire.ipc.messages import RowOpen, Sampling, ids_to_bytes


def _find(ids):
    """The definition of `find` for one row, in plain Python."""
    for n in (4, 3, 2):
        for start in range(len(ids) - n - 1, -1, -1):
            if ids[start : start + n] == ids[-n:]:
                return start + n
    return -1


def _rows(prompts, level=0):
    rows = Rows(num_rows=len(prompts), max_len=400, block_size=16, vocab_size=320)
    rows.ids[:] = 3  # ids of an earlier request
    for i, prompt in enumerate(prompts):
        rows.open(RowOpen(i, ids_to_bytes(prompt), len(prompt), len(prompt) - 1, b"", Sampling()))
        rows.draft_level[i] = level
    return rows


@pytest.mark.parametrize("vocab", [1, 2, 4, 20])
def test_found_positions_agree_with_the_definition(vocab):
    rng = random.Random(vocab)
    found = 0
    for _ in range(200):
        prompts = [[rng.randrange(vocab) for _ in range(rng.randint(2, 40))] for _ in range(rng.randint(1, 9))]
        nums = np.array([len(prompt) for prompt in prompts])
        starts = find(_rows(prompts).ids[:, : nums.max()], nums).tolist()
        assert starts == [_find(prompt) for prompt in prompts], prompts
        found += sum(start >= 0 for start in starts)
    assert found > 40


def test_draft_tokens_are_those_after_the_match_repeated_if_too_few():
    prompts = [[5, 6, 7, 8, 9, 4, 5, 6], [1, 2, 1, 2], [9, 9, 9], [1, 2, 3, 4], [8], [*range(300), 17, 18]]
    rows = _rows(prompts)
    order = np.array([3, 1, 0, 2, 5, 4])
    assert draft(rows, order, 5, 1 / 3).tolist() == [0, 5, 5, 5, 5, 0]
    assert rows.num_ids.tolist() == [len(prompt) for prompt in prompts], "draft tokens do not count as ids yet"
    draft_tokens = {i: rows.ids[i, len(prompts[i]) : len(prompts[i]) + 5].tolist() for i in (0, 1, 2, 5)}
    assert draft_tokens == {0: [7, 8, 9, 4, 5], 1: [1, 2, 1, 2, 1], 2: [9] * 5, 5: [19, 20, 21, 22, 23]}


def test_draft_tokens_behind_steps_in_flight_are_where_the_row_is_expected_to_go_on():
    """Three ids are not known yet, and the text beyond the known ids is stale."""
    prompts = [[5, 6, 7, 8, 9, 4, 5, 6], [1, 2] * 3]
    rows = _rows(prompts)
    picked, nums = np.array([1, 0]), np.array([6, 8])
    ends = nums + 3 + 2
    assert draft(rows, picked, 2, 1 / 3, num_ids=nums, ends=ends).tolist() == [2, 2]
    assert rows.ids[0, 8:14].tolist() == [7, 8, 9, 4, 5, 3] and rows.ids[1, 6:12].tolist() == [1, 2, 1, 2, 1, 3]
    assert draft(rows, picked[:1], 2, 1 / 3, num_ids=np.array([6]), ends=np.array([404])).tolist() == [2]
    assert rows.ids[1, 6:].tolist() == [1, 2] * 197 + [1], "a row ends with its memory"


def test_a_silent_draft_is_judged_once_its_position_is_known():
    rows, row, known = _rows([[9] * 50], level=1), np.arange(1), np.array([50])
    assert draft(rows, row, 4, 1 / 3, num_ids=known)[0] == 0 and rows.silent_end[0] == 50
    rows.ids[0, 50] = 8  # stale
    for _ in range(5):
        assert draft(rows, row, 4, 1 / 3, num_ids=known)[0] == 0
    assert rows.draft_level[0] == 1 and rows.silent_draft[0] == 9, "nothing is known yet"
    rows.ids[0, 50] = 9
    assert draft(rows, row, 4, 1 / 3, num_ids=known + 1)[0] == 4


def _sample(rows, row, token):
    """Append the id that the step after `draft` samples for a row without draft tokens."""
    rows.append(np.array([row]), rows.num_ids[[row]], np.array([token]))


def test_a_row_with_rejected_drafts_searches_less_and_less_often():
    rows, row, searches = _rows([[9] * 5], level=1), np.arange(1), []
    for step in range(80):
        assert draft(rows, row, 4, 1 / 3)[0] == 0
        if rows.silent_draft[0] >= 0:
            searches.append(step)
        _sample(rows, 0, 9)
        rows.ids[0, : rows.num_ids[0]] = 9
        if rows.silent_draft[0] >= 0:
            rows.ids[0, rows.silent_end[0]] = 8  # not the draft token
    assert searches == [0, 4, 12, 28, 44, 60, 76]


def test_a_row_drafts_while_its_draft_tokens_are_accepted():
    rows, row = _rows([[1, 2, 3] * 5], level=4), np.arange(1)
    num_drafts = []
    for i in range(8):
        num_drafts.append(int(draft(rows, row, 4, 1 / 3)[0]))
        _sample(rows, 0, i % 3 + 1)
    assert num_drafts == [0, 0, 0, 0, 0, 4, 4, 4], "it searches in steps 0 and 4"
    assert draft(rows, row, 4, 1 / 3)[0] == 4
    learn(rows, row, np.array([False]), 1 / 3)
    assert draft(rows, row, 4, 1 / 3)[0] == 0 and rows.draft_level[0] == 1, "a rejection lowers the level"


def test_a_row_waits_after_a_search_that_found_nothing():
    rows, row = _rows([[1, 2, 3, 4, 5]]), np.arange(1)
    assert not draft(rows, row, 4, 1 / 3)[0]
    rows.ids[0, :5] = 7
    assert [int(draft(rows, row, 4, 1 / 3)[0]) for _ in range(4)] == [0, 0, 0, 4]


def test_a_new_request_begins_with_silent_drafts():
    rows, row = _rows([[9] * 50]), np.arange(1)
    rows.draft_wait[0] = 60
    rows.silent_draft[0] = 9
    rows.open(RowOpen(0, ids_to_bytes([9] * 50), 50, 49, b"", Sampling()))
    assert draft(rows, row, 4, 1 / 3)[0] == 0 and rows.silent_end[0] == 50
    _sample(rows, 0, 9)
    assert draft(rows, row, 4, 1 / 3)[0] == 4


def test_a_row_keeps_its_tokens_up_to_the_first_wrong_draft_token():
    rows = _rows([[1, 2, 3], [4, 5, 6], [7, 8, 9], [1, 1, 1]])
    rows.ids[0, 3:6] = 10, 11, 12
    rows.ids[1, 3:5] = 20, 21
    rows.ids[2, 3:5] = 0, 30
    picked, ends = np.array([0, 0, 0, 0, 3, 1, 1, 1, 2, 2, 2]), np.array([3, 4, 5, 6, 3, 3, 4, 5, 3, 4, 5])
    kept = rows.append(picked, ends, np.array([10, 11, 99, 12, 50, 20, 21, 22, -1, 30, 31]))
    assert kept.tolist() == [True, True, True, False, True, True, True, True, True, False, False]
    assert rows.num_ids.tolist() == [6, 6, 4, 4] and rows.num_computed.tolist() == [5, 5, 3, 3]
    assert [rows.ids[i, 3 : rows.num_ids[i]].tolist() for i in range(4)] == [[10, 11, 99], [20, 21, 22], [0], [50]]


@pytest.mark.parametrize(("break_even", "accepted", "bold"), [(0.1, 0.4, True), (0.9, 0.4, False), (0.9, 1.0, True)])
def test_expensive_positions_need_more_accepted_draft_tokens(break_even, accepted, bold):
    rows, row, rng = _rows([[9] * 5]), np.arange(1), random.Random(1)
    levels = []
    for _ in range(300):
        learn(rows, row, np.array([rng.random() < accepted]), break_even)
        levels.append(rows.draft_level[0])
    assert (sum(levels[100:]) / 200 < 1) == bold
