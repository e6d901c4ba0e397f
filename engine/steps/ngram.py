"""Draft tokens from the row's own text: prompt lookup by n-grams.

Where the last ids of a row appeared once before, the ids that followed are proposed again as draft tokens. A rejected
draft token costs the computation of its position, so each row has a level of caution. Below level 1 a row drafts in
every step, as many tokens as it may. From level 1 on it searches only every 2^level steps, and drafts silently: nothing
is computed, and the next step shows whether the draft token was right. A wrong one raises the level and a right one
lowers it, by amounts that balance at the share of accepted drafts where drafting breaks even. So a text without
repetition costs a search now and then, and one that begins to repeat is noticed within about twenty tokens where drafts
are cheap.
"""

import numpy as np
from numpy.typing import NDArray

from .rows import Rows

_LOOK_AGAIN = 3  # steps that a row waits after a search that found nothing,
_LOOK_LATER = 7  # and a row at level 1 or above
_TOGETHER = 4  # rows at level 1 or above search in every fourth step, all at once: one search costs as much as many
_MAX_LEVEL = 4


def find(ids: NDArray[np.int32], nums: NDArray[np.int64]) -> NDArray[np.int64]:
    """For each row the index after an earlier occurrence of its last n ids, for the greatest n of 4, 3 and 2 that has
    one, and of these the latest; -1 if there is none.

    ids: [rows, at least max(nums)], of which the first `nums` are the row's; nums: [rows], each at least 2.
    """
    each, width = np.arange(len(nums)), int(nums.max()) - 1
    again = (ids[:, : width - 1] == ids[each, nums - 2][:, None]) & (ids[:, 1:width] == ids[each, nums - 1][:, None])
    row, end = np.divmod(np.flatnonzero(again), max(1, width - 1))
    end += 1  # the end of an occurrence of the last two ids
    inside = end < nums[row] - 1
    row, end = row[inside], end[inside]
    third = (end >= 2) & (ids[row, end - 2] == ids[row, nums[row] - 3])
    fourth = third & (end >= 3) & (ids[row, end - 3] == ids[row, nums[row] - 4])
    best = np.full(len(nums), -1)
    np.maximum.at(best, row, (third.astype(np.int64) + fourth) * width + end)
    return np.where(best < 0, -1, best % width + 1)


def draft(
    rows: Rows,
    picked: NDArray[np.int64],
    most: int,
    break_even: float,
    *,
    num_ids: NDArray[np.int64] | None = None,
    ends: NDArray[np.int64] | None = None,
) -> NDArray[np.int64]:
    """Writes draft tokens after the ids of the rows `picked`. Returns their number for each, 0 or `most`: [picked].
    break_even: the share of draft tokens, above 0, that must be accepted for drafting to pay.

    num_ids: [picked] how many ids are known; None: `rows.num_ids`. ends: [picked] the position behind the last draft
    token; None: `most` behind the known ids. With steps in flight it is farther away: what is written for the positions
    of those steps is what they are expected to sample."""
    num_ids = rows.num_ids[picked] if num_ids is None else num_ids
    ends = num_ids + most if ends is None else ends
    drafted = np.zeros(len(picked), np.int64)
    is_silent = rows.silent_draft[picked] >= 0
    is_judged = is_silent & (rows.silent_end[picked] < num_ids)
    _judge(rows, picked[is_judged], break_even)
    wait = rows.draft_wait[picked] - 1
    rows.draft_wait[picked] = wait
    due = (wait < 0) & (num_ids >= 2) & (is_judged | ~is_silent)
    if rows.draft_step % _TOGETHER:
        due &= rows.draft_level[picked] < 1
    rows.draft_step += 1
    look = np.flatnonzero(due)
    if not len(look):
        return drafted
    # Rows of similar length are searched together, because the search pads all rows to the longest.
    magnitude = np.frexp(num_ids[look])[1]
    for size in set(magnitude.tolist()):
        places = look[magnitude == size]
        some, nums = picked[places], num_ids[places]
        starts = find(rows.ids[some, : int(nums.max())], nums)
        found = starts >= 0
        cautious = rows.draft_level[some] >= 1
        rows.draft_wait[some[~found]] = np.where(cautious[~found], _LOOK_LATER, _LOOK_AGAIN)
        silent = found & cautious
        rows.silent_draft[some[silent]] = rows.ids[some[silent], starts[silent]]
        rows.silent_end[some[silent]] = nums[silent]
        bold = found & ~silent
        drafted[places[bold]] = most
        _repeat(rows.ids, some[bold], starts[bold], nums[bold], ends[places[bold]])
    return drafted


def _repeat(
    ids: NDArray[np.int32],
    rows: NDArray[np.int64],
    starts: NDArray[np.int64],
    nums: NDArray[np.int64],
    ends: NDArray[np.int64],
) -> None:
    """Continues the first `nums` ids of each row up to `ends` with those from `starts` on, again and again."""
    ahead = np.arange(int((ends - nums).max(initial=0)))
    positions = nums[:, None] + ahead
    follow = starts[:, None] + ahead % (nums - starts)[:, None]
    row, place = np.nonzero(positions < np.minimum(ends, ids.shape[1])[:, None])
    ids[rows[row], positions[row, place]] = ids[rows[row], follow[row, place]]


def learn(rows: Rows, picked: NDArray[np.int64], good: NDArray[np.bool_], break_even: float) -> None:
    """Adjusts the levels of the rows `picked`. good: [picked], whether enough of their draft tokens were accepted."""
    decrease = (1 - break_even) / break_even
    level = (rows.draft_level[picked] + np.where(good, -decrease, 1)).clip(0, _MAX_LEVEL)
    rows.draft_level[picked] = level
    rows.draft_wait[picked] = np.where(level < 1, 0, np.exp2(level).round() - 1)


def _judge(rows: Rows, picked: NDArray[np.int64], break_even: float) -> None:
    """Compares the silent draft tokens of the rows `picked` with the ids that were sampled since."""
    if len(picked):
        learn(rows, picked, rows.ids[picked, rows.silent_end[picked]] == rows.silent_draft[picked], break_even)
        rows.silent_draft[picked] = -1
