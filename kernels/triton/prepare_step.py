"""Expands the host's packet into the inputs of a step's kernels, as the first node of the step's graph.

The state of the rows stays on the device: the id each row sampled last and its position, and its block tables, one for
each shelf of each group of the cache. So the host can describe a step before the previous one has ended: it names the
rows, their positions and their new blocks. Where a step in flight has draft tokens, only the device will know where
the row goes on: the packet says so and has the ids for all positions that are possible. A packet is one int32 array,
sent in one copy:

    rows, tokens, offset of the ids, offset of the pages, offset of the table of states from here, new blocks in all,
        rows that take the path of decode rows, 0
    a record for each row: row, first token, tokens, position of the first (-1: the one of the id that the row sampled
        last), index of its first new block in its tables, number of new blocks, offset of these among a table's new
        blocks, offset of its ids among the ids, position of the first of its ids, first sample, samples, length of the
        prompt, place of its position 0 in the rotary tables
    for each row an id for each position that its tokens may have; -1: the id that the row sampled last
    for each table, the pages of the new blocks of all rows
    the table of states (see `scans.py`), if the model has recurrent layers

A graph is recorded for a padded number of rows and tokens. Padding rows get a context of 0, and padding tokens get no
slot.
"""

from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray
from torch import Tensor

from .variant import Plan, Variant, shaped

_HEADER = 8
STATES_AT = 4  # of the header; at a multiple of 16 bytes, as kernels' pointers must
_RECORD = 13
_BLOCK = 256  # tokens or blocks that a program copies at a time


def packet_size(*, rows: int, tokens: int, new_blocks: int, tables: int) -> int:
    """The most int32 that a packet takes, without the table of states. tokens: ids in all."""
    return _HEADER + _RECORD * rows + tokens + tables * new_blocks


def fill_packet(
    packet: NDArray[np.int32],
    *,
    rows: NDArray[np.integer[Any]],
    counts: NDArray[np.integer[Any]],
    starts: NDArray[np.integer[Any]],
    ids: NDArray[np.integer[Any]],
    places: NDArray[np.integer[Any]],
    num_new: NDArray[np.integer[Any]],
    pages: NDArray[np.integer[Any]],
    num_decode: int = 0,
    num_behind: NDArray[np.integer[Any]] | int = 0,
    num_samples: NDArray[np.integer[Any]] | int = 0,
    num_prompt: NDArray[np.integer[Any]] | int = 0,
    rotary_firsts: NDArray[np.integer[Any]] | int = 0,
) -> int:
    """Writes a step's packet and returns its length in int32. rows: the rows in step order; counts, starts: [rows]
    tokens of each and the position of the first; places, num_new: [rows] index of each row's first new block in its
    tables, and their number; pages: [tables, new blocks], row after row. The table of states begins where the packet
    ends.

    num_decode: how many of the first rows get a length in `decode_lens`. num_behind: [rows] or one number for all, how
    many positions before `starts` a row may begin; above 0: it begins with the id that it sampled last, wherever that
    is. ids: row after row, those of the positions from starts - num_behind up to starts + counts; -1 for the id that
    the row sampled last. num_samples: of each row, after its last tokens; num_prompt: where its output begins;
    rotary_firsts: where the rotary tables have its position 0."""
    num_ids = counts + num_behind
    ids_at = _HEADER + _RECORD * len(rows)
    blocks_at = ids_at + len(ids)
    end = blocks_at + pages.size
    packet[:_HEADER] = len(rows), counts.sum(), ids_at, blocks_at, end - STATES_AT, pages.shape[1], num_decode, 0
    records = packet[_HEADER:ids_at].reshape(-1, _RECORD)
    records[:, 0] = rows
    records[:, 1] = np.cumsum(counts) - counts
    records[:, 2] = counts
    records[:, 3] = np.where(num_ids > counts, -1, starts)
    records[:, 4] = places
    records[:, 5] = num_new
    records[:, 6] = np.cumsum(num_new) - num_new
    records[:, 7] = np.cumsum(num_ids) - num_ids
    records[:, 8] = starts - num_behind
    records[:, 10] = num_samples
    records[:, 9] = np.cumsum(records[:, 10]) - records[:, 10]
    records[:, 11] = num_prompt
    records[:, 12] = rotary_firsts
    packet[ids_at:blocks_at] = ids
    packet[blocks_at:end] = pages.reshape(-1)
    return end


@triton.jit(do_not_specialize=["max_tokens", "max_blocks", "all_rows", "slots_stride", "max_rows"])
def _prepare_step(
    packet,
    last_ids,
    last_positions,
    row_tables,
    ids,
    positions,
    slots,
    context_lens,
    decode_lens,
    sample_positions,
    tables,
    rotary_places,
    max_tokens,
    max_blocks,
    all_rows,
    slots_stride,
    max_rows,
    PAGE: tl.constexpr,
    HEADER: tl.constexpr,
    RECORD: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_TABLES: tl.constexpr,
):
    """For each table one program per row of the graph, and a last one for the padding tokens. Without tables the same
    programs write the rest."""
    place = tl.program_id(0)
    number = tl.program_id(1).to(tl.int64)  # of the table
    own_slots = slots + number * slots_stride
    lanes = tl.arange(0, BLOCK)
    num_rows = tl.load(packet)
    if place == tl.num_programs(0) - 1:
        for begin in range(tl.load(packet + 1), max_tokens, BLOCK):
            token = begin + lanes
            tl.store(ids + token, 0, mask=token < max_tokens)
            tl.store(positions + token, 0, mask=token < max_tokens)
            if rotary_places is not None:
                tl.store(rotary_places + token, 0, mask=token < max_tokens)
            if HAS_TABLES:
                tl.store(own_slots + token, -1, mask=token < max_tokens)
    elif place >= num_rows:
        tl.store(context_lens + place, 0)
        tl.store(decode_lens + place, 0)
    else:
        record = packet + HEADER + place * RECORD
        row = tl.load(record)
        first_token = tl.load(record + 1)
        count = tl.load(record + 2)
        num_prompt = tl.load(record + 11)
        start = tl.load(record + 3)
        is_behind = start < 0
        start = tl.where(is_behind, num_prompt + tl.load(last_positions + row), start)
        known_ids = packet + tl.load(packet + 2) + tl.load(record + 7) - tl.load(record + 8)
        table = row_tables + (number * all_rows + row) * max_blocks
        if HAS_TABLES:
            num_new = tl.load(record + 5)
            new_blocks = packet + tl.load(packet + 3) + number * tl.load(packet + 5) + tl.load(record + 6)
            new_table = table + tl.load(record + 4)
            for begin in range(0, num_new, BLOCK):
                i = begin + lanes
                tl.store(new_table + i, tl.load(new_blocks + i, mask=i < num_new), mask=i < num_new)
            tl.debug_barrier()  # other threads read what this one wrote

        end = start + count
        last_id = tl.load(last_ids + row)
        for begin in range(0, count, BLOCK):
            i = begin + lanes
            inside = i < count
            position = start + i
            known = tl.load(known_ids + position, mask=inside, other=0)
            is_last = (known < 0) | (is_behind & (i == 0))
            tl.store(ids + first_token + i, tl.where(is_last, last_id, known), mask=inside)
            tl.store(positions + first_token + i, position, mask=inside)
            if rotary_places is not None:
                tl.store(rotary_places + first_token + i, tl.load(record + 12) + position, mask=inside)
            if HAS_TABLES:
                block = tl.load(table + position // PAGE, mask=inside, other=0)
                tl.store(own_slots + first_token + i, block * PAGE + position % PAGE, mask=inside)

        if HAS_TABLES:
            num_blocks = (end + PAGE - 1) // PAGE
            step_table = tables + (number * max_rows + place) * max_blocks
            for begin in range(0, num_blocks, BLOCK):
                i = begin + lanes
                tl.store(step_table + i, tl.load(table + i, mask=i < num_blocks), mask=i < num_blocks)
        tl.store(context_lens + place, end)
        tl.store(decode_lens + place, tl.where(place < tl.load(packet + 6), end, 0))
        num_samples = tl.load(record + 10)
        own_samples = sample_positions + tl.load(record + 9)
        for begin in range(0, num_samples, BLOCK):
            i = begin + lanes
            tl.store(own_samples + i, end - num_prompt - num_samples + 1 + i, mask=i < num_samples)


@triton.jit(do_not_specialize=["num_sampled"])
def _remember_sampled(last_ids, last_positions, sampled, positions, rows, num_sampled, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = i < num_sampled
    row = tl.load(rows + i, mask=inside, other=0)
    tl.store(last_ids + row, tl.maximum(tl.load(sampled + i, mask=inside, other=0), 0), mask=inside)
    tl.store(last_positions + row, tl.load(positions + i, mask=inside, other=0), mask=inside)


@triton.jit
def _accept_drafts(
    packet,
    ids,
    sampled,
    positions,
    last_ids,
    last_positions,
    accepted,
    HEADER: tl.constexpr,
    RECORD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program per row of the packet."""
    record = packet + HEADER + tl.program_id(0) * RECORD
    num = tl.load(record + 10)
    if num > 1:
        row = tl.load(record)
        first = tl.load(record + 9)
        token = tl.load(record + 1) + tl.load(record + 2) - num  # whose logits the first sample is from
        lane = tl.arange(0, BLOCK)
        own = tl.load(sampled + first + lane, mask=lane < num, other=-1)
        draft = tl.load(ids + token + 1 + lane, mask=lane < num - 1, other=-1)
        is_right = (lane < num - 1) & (own == draft)
        num_right = tl.min(tl.where(is_right, BLOCK, lane), axis=0)
        tl.store(last_ids + row, tl.maximum(tl.load(sampled + first + num_right), 0))
        tl.store(last_positions + row, tl.load(positions + first + num_right))
        tl.store(accepted + row, num_right)


def prepare_step(
    packet: Tensor,
    last_ids: Tensor,
    last_positions: Tensor,
    row_tables: Tensor,
    ids: Tensor,
    positions: Tensor,
    slots: Tensor,
    context_lens: Tensor,
    decode_lens: Tensor,
    sample_positions: Tensor,
    tables: Tensor,
    block_size: int,
    rotary_places: Tensor | None = None,
) -> None:
    """All tensors are int32. State: last_ids, last_positions: [all rows] the id that each row sampled last, and its
    position in the output, from 0; row_tables: [tables, all rows, max blocks], to which the new blocks are added. Step:
    ids, positions: [max tokens]; slots: [tables, max tokens]; context_lens, decode_lens: [max rows], this step's tokens
    included, the latter 0 for all but decode rows; sample_positions: [samples], in the output; tables: [tables, max
    rows, max blocks], of which only a row's own blocks are written. Slots and tables may be the first ones of more.
    rotary_places: [max tokens], of the positions in the rotary tables; None: they are the positions. A row may appear
    once in a packet.
    """
    assert tables.shape[2] == row_tables.shape[2] == tables.stride(1), (tables.shape, row_tables.shape)
    assert row_tables.is_contiguous() and len(slots) == len(tables) == len(row_tables), (slots.shape, tables.shape)
    assert len(decode_lens) == len(context_lens), (decode_lens.shape, context_lens.shape)
    _prepare_step[(len(context_lens) + 1, max(1, len(tables)))](
        packet,
        last_ids,
        last_positions,
        row_tables,
        ids,
        positions,
        slots,
        context_lens,
        decode_lens,
        sample_positions,
        tables,
        rotary_places,
        len(ids),
        tables.shape[2],
        row_tables.shape[1],
        slots.stride(0),
        tables.stride(0) // tables.shape[2],
        PAGE=block_size,
        HEADER=_HEADER,
        RECORD=_RECORD,
        BLOCK=_BLOCK,
        HAS_TABLES=len(tables) > 0,
        num_warps=1,
    )


def remember_sampled(
    last_ids: Tensor, last_positions: Tensor, sampled: Tensor, positions: Tensor, rows: Tensor
) -> None:
    """Keeps the sampled ids and their positions for the next step. sampled, positions, rows: [samples] int32; -1, which
    is no id, is kept as 0. If a row appears more than once, any of its samples may stay, until `accept_drafts`."""
    grid = (triton.cdiv(len(rows), _BLOCK),)
    _remember_sampled[grid](last_ids, last_positions, sampled, positions, rows, len(rows), BLOCK=_BLOCK, num_warps=4)


def accept_drafts(
    packet: Tensor,
    ids: Tensor,
    sampled: Tensor,
    positions: Tensor,
    last_ids: Tensor,
    last_positions: Tensor,
    accepted: Tensor,
    *,
    rows: int,
    most: int,
) -> None:
    """Accepts the draft tokens of the first `rows` rows of the packet that are the token sampled at their position, up
    to the first that is not. The token sampled there is the last one of its row.

    ids: [tokens] of the step; sampled, positions: [samples] of the step; last_ids, last_positions: as in
    `prepare_step`; accepted: [all rows] how many draft tokens were accepted, written for the rows that had some. All
    are int32. most: samples of a row.
    """
    if rows:
        _accept_drafts[(rows,)](
            packet,
            ids,
            sampled,
            positions,
            last_ids,
            last_positions,
            accepted,
            HEADER=_HEADER,
            RECORD=_RECORD,
            BLOCK=triton.next_power_of_2(most),
            num_warps=1,
        )


def _integers(*shape: int) -> Tensor:
    return shaped(*shape, dtype=torch.int32)


def _variant(block_size: int, *, has_regimes: bool = False) -> Variant:
    def launch(rows: int) -> None:
        tokens, tables, of_rows, state = _integers(40 * rows), _integers(1, rows, 700), _integers(rows), _integers(256)
        step = (tokens, tokens, tokens[None], of_rows, of_rows, of_rows, tables)
        rotary_places = tokens if has_regimes else None
        prepare_step(_integers(1000), state, state, _integers(1, 256, 700), *step, block_size, rotary_places)

    name = f"prepare_step page {block_size}" + (" two regimes" if has_regimes else "")
    return Variant(name=name, launch=launch, plans={"_prepare_step": Plan()})


def _launch_remember(rows: int) -> None:
    state, samples = _integers(256), _integers(rows)
    remember_sampled(state, state, samples, samples, samples)


def _launch_accept(rows: int) -> None:
    state, samples = _integers(256), _integers(8 * rows)
    accept_drafts(_integers(1000), samples, samples, samples, state, state, state, rows=rows, most=5)


VARIANTS = (
    _variant(64),
    _variant(64, has_regimes=True),
    Variant(name="remember_sampled", launch=_launch_remember, plans={"_remember_sampled": Plan()}),
    Variant(name="accept_drafts", launch=_launch_accept, plans={"_accept_drafts": Plan()}),
)
