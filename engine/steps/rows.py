"""The state of every row, in columns: ids, lengths, block tables and sampling parameters.

A row is the slot of one running request. The core decides which request has which row; this file keeps what the core
sent and what was sampled since. All columns are NumPy arrays, so that a step over many rows runs no Python per row.

A row has a block table for each shelf of each group of the cache (`attention/cache_groups.py`), except for those of
states and of an encoder's result, of which one comes last. A state has pages that the next pass reads, and pages that
all passes write. Of an encoder's result there is a table of as many positions as it has read.
"""

import math
from collections.abc import Iterator, Mapping

import numpy as np
from numpy.typing import NDArray

from ...ipc.messages import GroupTable, RowOpen, Sampling, StepPlan
from ..attention.cache_groups import ONE_GROUP, CacheGroups

_FIRST_LEVEL = 1  # of `draft_level`: a row drafts only after silent drafts were right


class Rows:
    """`num_rows` rows of at most `max_len` positions, plus the id that may be sampled after the last of them."""

    def __init__(
        self, *, num_rows: int, max_len: int, block_size: int, vocab_size: int, groups: CacheGroups = ONE_GROUP
    ) -> None:
        self._vocab_size = vocab_size
        self.block_size = block_size
        state_pages = [group.pages for group in groups.groups if group.lifetime.kind == "state"]
        cross = [number for number, group in enumerate(groups.groups) if group.lifetime.kind == "cross"]
        self.has_states, self.has_cross = bool(state_pages), bool(cross)
        num_groups = len(groups.groups) - len(state_pages) - len(cross)
        self._group_tables = [groups.tables(number) for number in range(num_groups)]
        # The system zeroes the two large columns lazily: they take memory only where rows write.
        self.ids: NDArray[np.int32] = np.zeros((num_rows, max_len + 1), np.int32)
        of_cross = groups.tables(cross[0]) if cross else range(0)
        num_tables = groups.num_tables - sum(state_pages) - len(of_cross)
        max_blocks = -(-(max_len + 1) // block_size)
        self.tables: NDArray[np.int32] = np.zeros((num_tables, num_rows, max_blocks), np.int32)  # pages
        self.num_blocks: NDArray[np.int64] = np.zeros((num_groups, num_rows), np.int64)  # released ones included
        # Pages of the recurrent state, [rows, k]: those that the next pass reads (-1: zeros), and those that it writes.
        self.state_read: NDArray[np.int32] = np.full((num_rows, sum(state_pages)), -1, np.int32)
        self.state_written: NDArray[np.int32] = np.full((num_rows, sum(state_pages)), -1, np.int32)
        # Pages of the encoder's result, and the tokens that it is of.
        self.cross: NDArray[np.int32] = np.zeros((len(of_cross), num_rows, max_blocks), np.int32)
        self.num_encoded: NDArray[np.int64] = np.zeros(num_rows, np.int64)
        self.num_ids: NDArray[np.int64] = np.zeros(num_rows, np.int64)  # ids known; those beyond are stale
        self.num_prompt: NDArray[np.int64] = np.zeros(num_rows, np.int64)
        self.num_computed: NDArray[np.int64] = np.zeros(num_rows, np.int64)  # positions whose KV is in the cache
        self.regime: NDArray[np.int64] = np.zeros(num_rows, np.int64)

        self.temperature: NDArray[np.float32] = np.zeros(num_rows, np.float32)  # 0: greedy
        self.top_k: NDArray[np.int64] = np.zeros(num_rows, np.int64)
        self.top_p: NDArray[np.float32] = np.ones(num_rows, np.float32)
        self.min_p: NDArray[np.float32] = np.zeros(num_rows, np.float32)
        self.seed: NDArray[np.uint64] = np.zeros(num_rows, np.uint64)
        self.num_logprobs: NDArray[np.int64] = np.full(num_rows, -1, np.int64)  # -1: not wanted
        self.num_prompt_logprobs: NDArray[np.int64] = np.full(num_rows, -1, np.int64)
        self.edits_logits: NDArray[np.bool_] = np.zeros(num_rows, np.bool_)  # has a bias or a penalty
        self.uses_logits: NDArray[np.bool_] = np.zeros(num_rows, np.bool_)  # needs more than the greatest logit
        self.sampling: list[Sampling] = [Sampling()] * num_rows  # for the rows that edit logits
        self.min_len: NDArray[np.int64] = np.zeros(num_rows, np.int64)  # length from which an end token is allowed
        self.ends: list[NDArray[np.int32]] = [np.zeros(0, np.int32)] * num_rows  # for the rows with a `min_len`

        # The tokens that rows may sample, [⌈vocab / 32⌉] int32: in all steps, by their parameters; and in this step.
        self._allowed: dict[int, NDArray[np.int32]] = {}
        self.masks: dict[int, NDArray[np.int32]] = {}
        self._anything: NDArray[np.int32] = np.full(-(-vocab_size // 32), -1, np.int32)
        self.is_masked: NDArray[np.bool_] = np.zeros(num_rows, np.bool_)  # is in `masks`

        self.draft_step = 0  # calls of `draft`; `ngram.py` owns this and the next four
        self.draft_level: NDArray[np.float64] = np.zeros(num_rows)
        self.draft_wait: NDArray[np.int64] = np.zeros(num_rows, np.int64)  # steps to wait before the next search
        self.silent_draft: NDArray[np.int64] = np.full(num_rows, -1, np.int64)  # the id at `silent_end`; -1: none
        self.silent_end: NDArray[np.int64] = np.zeros(num_rows, np.int64)

    def open(self, row: RowOpen) -> None:
        """Replaces what the row held by the message."""
        i, sampling = row.row, row.sampling
        ids = np.frombuffer(row.ids, "<i4")
        self.ids[i, : len(ids)] = ids
        self.num_ids[i] = len(ids)
        self.num_prompt[i] = row.num_prompt
        self.num_computed[i] = row.num_computed
        self.regime[i] = row.regime
        tables = row.tables or (GroupTable(0, row.block_ids),)[: len(self._group_tables)]
        for group, table in zip(range(len(self._group_tables)), tables, strict=True):
            self.set_table(i, group, np.frombuffer(table.pages, "<i4"), first=table.first)
        if self.has_states:
            self.state_read[i] = np.frombuffer(row.state_from, "<i4") if row.state_from else -1
            self.state_written[i] = np.frombuffer(row.state, "<i4")
        if self.has_cross:
            blocks = np.frombuffer(row.cross, "<i4").reshape(-1, len(self.cross))
            self.cross[:, i, : len(blocks)] = blocks.T
            self.num_encoded[i] = row.num_encoded
        self.temperature[i] = sampling.temperature
        self.top_k[i] = sampling.top_k
        self.top_p[i] = sampling.top_p
        self.min_p[i] = sampling.min_p
        self.seed[i] = sampling.seed
        self.num_logprobs[i] = -1 if sampling.logprobs is None else sampling.logprobs
        self.num_prompt_logprobs[i] = -1 if sampling.prompt_logprobs is None else sampling.prompt_logprobs
        self._allowed.pop(i, None)
        if sampling.allowed_token_ids:
            self._allowed[i] = _bits(sampling.allowed_token_ids, self._vocab_size)
        self.sampling[i] = sampling
        self.min_len[i] = row.min_len
        self.ends[i] = np.frombuffer(row.ends, "<i4")
        self._note_edits(i)
        self.draft_level[i] = _FIRST_LEVEL
        self.draft_wait[i] = 0
        self.silent_draft[i] = -1

    def set_table(self, row: int, group: int, pages: NDArray[np.int32], *, first: int = 0) -> None:
        """The row's blocks from number `first` on; those before it are released. pages: those of a block next to each
        other."""
        tables = self._group_tables[group]
        blocks = pages.reshape(-1, len(tables))
        self.num_blocks[group, row] = first + len(blocks)
        self.tables[tables.start : tables.stop, row, first : first + len(blocks)] = blocks.T

    def advance_states(self, rows: NDArray[np.int64]) -> None:
        """After a pass: the next one reads the states that it wrote."""
        self.state_read[rows] = self.state_written[rows]

    def grow(self, plan: StepPlan) -> None:
        """Appends the plan's blocks to the rows' tables."""
        if not plan.grow_rows:
            return
        rows, pages = (np.frombuffer(column, "<i4").tolist() for column in (plan.grow_rows, plan.grow_blocks))
        groups = np.frombuffer(plan.grow_groups, "<i4").tolist() or [0] * len(rows)
        at = 0
        for row, group in zip(rows, groups, strict=True):
            tables = self._group_tables[group]
            self.tables[tables.start : tables.stop, row, self.num_blocks[group, row]] = pages[at : at + len(tables)]
            self.num_blocks[group, row] += 1
            at += len(tables)
        assert at == len(pages), f"{len(pages)} pages for {len(rows)} blocks"

    def num_positions(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """The positions for which each row has blocks."""
        if not self._group_tables:
            return np.full(len(rows), self.ids.shape[1], np.int64)
        least: NDArray[np.int64] = self.num_blocks[:, rows].min(axis=0)
        return least * self.block_size

    def pages_of_block(self, row: int, block: int) -> Iterator[tuple[int, int]]:
        """(table, page) of one of the row's blocks, for all groups of positions."""
        yield from enumerate(self.tables[:, row, block].tolist())

    def mask(self, plan: StepPlan) -> None:
        """Sets the masks of this step. Those of late rows allow anything until `mask_late`."""
        if not self.masks and not self._allowed and not plan.masked_rows and not plan.late_rows:
            return
        self.is_masked[list(self.masks)] = False
        allowed = self._allowed
        self.masks = {row: allowed[row] for row in np.frombuffer(plan.rows, "<i4").tolist() if row in allowed}
        if plan.masked_rows:
            rows = np.frombuffer(plan.masked_rows, "<i4").tolist()
            for row, mask in zip(rows, np.frombuffer(plan.masks, "<i4").reshape(len(rows), -1), strict=True):
                self.masks[row] = mask & allowed[row] if row in allowed else mask
        for row in np.frombuffer(plan.late_rows, "<i4").tolist():
            self.masks.setdefault(row, self._anything)
        self.is_masked[list(self.masks)] = True

    def mask_late(self, masks: Mapping[int, bytes]) -> None:
        """Sets masks of late rows, before the step samples."""
        for row, bits in masks.items():
            mask = np.frombuffer(bits, "<i4")
            self.masks[row] = mask & self._allowed[row] if row in self._allowed else mask

    def lift_minimum(self, rows: NDArray[np.int64], ends: NDArray[np.int64]) -> list[int]:
        """The rows that may sample an end token at the positions `ends` for the first time."""
        lifted = [int(row) for row in rows[(self.min_len[rows] > 0) & (ends >= self.min_len[rows])]]
        for row in lifted:
            self.min_len[row] = 0
            self._note_edits(row)
        return lifted

    def bias(self, row: int) -> dict[int, float]:
        """The bias of the row's next token: token id → what is added to its logit."""
        bias = dict(self.sampling[row].logit_bias or {})
        if self.min_len[row]:
            bias |= dict.fromkeys(self.ends[row].tolist(), -math.inf)
        return bias

    def _note_edits(self, row: int) -> None:
        sampling = self.sampling[row]
        self.edits_logits[row] = bool(
            sampling.logit_bias
            or self.min_len[row]
            or sampling.repetition_penalty != 1
            or sampling.presence_penalty
            or sampling.frequency_penalty
        )
        self.uses_logits[row] = self.edits_logits[row] or sampling.temperature > 0 or sampling.logprobs is not None

    def append(self, rows: NDArray[np.int64], ends: NDArray[np.int64], ids: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Stores the ids sampled for the positions `ends`, which become the rows' last. A row with draft tokens stands
        here several times in succession, by position; ids sampled after a wrong draft token are dropped. Returns which
        ids are kept: [ids].

        An invalid id (-1) is stored as 0: the core fails such a request, but plans made before it knew may still
        compute the row."""
        kept = up_to_wrong(rows, self.ids[rows, ends] != ids)
        rows, ends, ids = rows[kept], ends[kept], ids[kept]
        self.ids[rows, ends] = np.maximum(ids, 0)
        self.num_computed[rows] = ends  # NumPy keeps the last of a row's assignments
        self.num_ids[rows] = ends + 1
        return kept


def up_to_wrong(rows: NDArray[np.int64], wrong: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Which samples of a step belong to the text: of each row those up to its first wrong one, that included. rows:
    [samples], those of a row in succession; wrong: [samples] whether the draft token at the position is another."""
    again = rows[1:] == rows[:-1]
    if not again.any():
        return np.ones(len(rows), np.bool_)
    wrong_before: NDArray[np.int64] = np.cumsum(wrong) - wrong
    firsts = np.flatnonzero(np.concatenate(([True], ~again)))
    kept: NDArray[np.bool_] = wrong_before == np.repeat(wrong_before[firsts], np.diff(firsts, append=len(rows)))
    return kept


def _bits(tokens: tuple[int, ...], vocab_size: int) -> NDArray[np.int32]:
    """A mask that allows these tokens."""
    allowed = np.zeros(-(-vocab_size // 32) * 32, np.bool_)
    allowed[list(tokens)] = True
    return np.packbits(allowed, bitorder="little").view("<i4")
