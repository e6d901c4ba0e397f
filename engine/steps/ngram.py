"""Guesses the next ids of rows from what they said before: prompt lookup, by n-grams.

Where the last few ids of a row stood once before, those that followed are guessed to follow again. A wrong guess costs
the computing of its position, so each row has a level that says how timid it is. Below level 1 it guesses in every step
as many ids as it may. From there on it looks every 2^level steps only, and guesses silently: nothing is computed, and
the next step shows whether the guess was right. A wrong one makes it more timid and a right one bolder, by as much as
keeps the level where the share of right ones is just what makes guessing pay. So a text that does not repeat costs a
glance now and then, and one that begins to is noticed within some twenty tokens where guesses are cheap.
"""

import numpy as np
from numpy.typing import NDArray

from .rows import Rows

_LOOK_AGAIN = 3  # steps that a row waits in whose ids nothing was found,
_LOOK_LATER = 7  # and a timid one
_TOGETHER = 4  # timid rows look in every fourth step only, all at once: a glance costs the same for one and for many
_MAX_TIMID = 4  # level


def find(ids: NDArray[np.int32], nums: NDArray[np.int64]) -> NDArray[np.int64]:
    """For each row, where that stands which followed its last n ids when they stood there before: for the greatest n
    from 4 down to 2 for which they did, and the latest such place; -1 if there is none.

    ids: [rows, at least max(nums)], of which the first `nums` are a row's; nums: [rows], each at least 2.
    """
    each, width = np.arange(len(nums)), int(nums.max()) - 1
    again = (ids[:, : width - 1] == ids[each, nums - 2][:, None]) & (ids[:, 1:width] == ids[each, nums - 1][:, None])
    row, end = np.divmod(np.flatnonzero(again), max(1, width - 1))
    end += 1  # where two ids that are the last two end
    inside = end < nums[row] - 1
    row, end = row[inside], end[inside]
    third = (end >= 2) & (ids[row, end - 2] == ids[row, nums[row] - 3])
    fourth = third & (end >= 3) & (ids[row, end - 3] == ids[row, nums[row] - 4])
    best = np.full(len(nums), -1)
    np.maximum.at(best, row, (third.astype(np.int64) + fourth) * width + end)
    return np.where(best < 0, -1, best % width + 1)


def draft(rows: Rows, picked: NDArray[np.int64], most: int, break_even: float) -> NDArray[np.int64]:
    """Writes guesses behind the ids of the rows `picked`. How many of each, 0 or `most`: [picked]. `break_even`: the
    share of guesses, above 0, that must come true for guessing to pay."""
    drafted = np.zeros(len(picked), np.int64)
    _judge(rows, picked[rows.silent_draft[picked] >= 0], break_even)
    wait = rows.draft_wait[picked] - 1
    rows.draft_wait[picked] = wait
    num_ids = rows.num_ids[picked]
    due = (wait < 0) & (num_ids >= 2)
    if rows.draft_step % _TOGETHER:
        due &= rows.draft_level[picked] < 1
    rows.draft_step += 1
    look = np.flatnonzero(due)
    if not len(look):
        return drafted
    # Rows of like length are looked through together: a long one would make all others as long.
    magnitude = np.frexp(num_ids[look])[1]
    for size in set(magnitude.tolist()):
        places = look[magnitude == size]
        some, nums = picked[places], num_ids[places]
        starts = find(rows.ids[some, : int(nums.max())], nums)
        found = starts >= 0
        timid = rows.draft_level[some] >= 1
        rows.draft_wait[some[~found]] = np.where(timid[~found], _LOOK_LATER, _LOOK_AGAIN)
        silent = found & timid
        rows.silent_draft[some[silent]] = rows.ids[some[silent], starts[silent]]
        rows.silent_end[some[silent]] = nums[silent]
        bold = found & ~silent
        some, nums, starts = some[bold], nums[bold], starts[bold]
        ahead = np.arange(most)
        follow = starts[:, None] + ahead % (nums - starts)[:, None]  # what repeats is guessed to go on repeating
        rows.ids[some[:, None], nums[:, None] + ahead] = rows.ids[some[:, None], follow]
        drafted[places[bold]] = most
    return drafted


def learn(rows: Rows, picked: NDArray[np.int64], good: NDArray[np.bool_], break_even: float) -> None:
    """Whether the guesses of the rows `picked` were worth their while: [picked]."""
    bolder = (1 - break_even) / break_even
    level = (rows.draft_level[picked] + np.where(good, -bolder, 1)).clip(0, _MAX_TIMID)
    rows.draft_level[picked] = level
    rows.draft_wait[picked] = np.where(level < 1, 0, np.exp2(level).round() - 1)


def _judge(rows: Rows, picked: NDArray[np.int64], break_even: float) -> None:
    """The rows `picked` have made silent guesses, and what they were about is known by now."""
    if len(picked):
        learn(rows, picked, rows.ids[picked, rows.silent_end[picked]] == rows.silent_draft[picked], break_even)
        rows.silent_draft[picked] = -1
