"""Turns the host's packet into what a step's kernels read, as the first node of its graph.

The rows' state stays on the device: the id each row drew last, and its block table. So the host can describe a step
before the one before it has ended: it says which rows run, at which positions, and which blocks they were given. A
packet is one int32 array, sent in one copy:

    rows, tokens, where the ids begin, where the blocks begin
    a record for each row: row, first token, tokens, position of the first, place of its first new block in its table,
        new blocks, where in the packet's blocks these begin
    an id for each token; -1: the one that the row drew last
    the new blocks of all rows

A graph has room for more rows and tokens than a step may have. What is left over gets a context of 0, and tokens
without a slot.
"""

from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray
from torch import Tensor

from .variant import Plan, Variant, shaped

_HEADER = 4
_RECORD = 7
_BLOCK = 256  # tokens or blocks that a program moves at a time


def packet_size(*, rows: int, tokens: int, new_blocks: int) -> int:
    """Numbers that a packet takes up at most."""
    return _HEADER + _RECORD * rows + tokens + new_blocks


def fill_packet(
    packet: NDArray[np.int32],
    *,
    rows: NDArray[np.integer[Any]],
    counts: NDArray[np.integer[Any]],
    starts: NDArray[np.integer[Any]],
    ids: NDArray[np.integer[Any]],
    places: NDArray[np.integer[Any]],
    num_new: NDArray[np.integer[Any]],
    blocks: NDArray[np.integer[Any]],
) -> int:
    """Writes a step's packet and returns how many numbers it has. rows: the rows by place; counts, starts: [rows]
    tokens of each and the position of the first; ids: [tokens], -1 for the one the row drew last; places, num_new:
    [rows] where each row's new blocks go in its table, and how many; blocks: these, one row's after another."""
    ids_at = _HEADER + _RECORD * len(rows)
    blocks_at = ids_at + len(ids)
    packet[:_HEADER] = len(rows), len(ids), ids_at, blocks_at
    records = packet[_HEADER:ids_at].reshape(-1, _RECORD)
    records[:, 0] = rows
    records[:, 1] = np.cumsum(counts) - counts
    records[:, 2] = counts
    records[:, 3] = starts
    records[:, 4] = places
    records[:, 5] = num_new
    records[:, 6] = np.cumsum(num_new) - num_new
    packet[ids_at:blocks_at] = ids
    end = blocks_at + len(blocks)
    packet[blocks_at:end] = blocks
    return end


@triton.jit(do_not_specialize=["most_tokens", "most_blocks"])
def _prepare_step(
    packet,
    last_ids,
    row_tables,
    ids,
    positions,
    slots,
    context_lens,
    tables,
    most_tokens,
    most_blocks,
    PAGE: tl.constexpr,
    HEADER: tl.constexpr,
    RECORD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program a row, and a last one for the tokens that the step does not have."""
    place = tl.program_id(0)
    lanes = tl.arange(0, BLOCK)
    num_rows = tl.load(packet)
    if place == tl.num_programs(0) - 1:
        for begin in range(tl.load(packet + 1), most_tokens, BLOCK):
            token = begin + lanes
            tl.store(ids + token, 0, mask=token < most_tokens)
            tl.store(positions + token, 0, mask=token < most_tokens)
            tl.store(slots + token, -1, mask=token < most_tokens)
    elif place >= num_rows:
        tl.store(context_lens + place, 0)
    else:
        record = packet + HEADER + place * RECORD
        row = tl.load(record)
        first_token = tl.load(record + 1)
        count = tl.load(record + 2)
        start = tl.load(record + 3)
        num_new = tl.load(record + 5)
        new_blocks = packet + tl.load(packet + 3) + tl.load(record + 6)
        known_ids = packet + tl.load(packet + 2)
        table = row_tables + row.to(tl.int64) * most_blocks
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
            known = tl.load(known_ids + first_token + i, mask=inside, other=0)
            block = tl.load(table + position // PAGE, mask=inside, other=0)
            tl.store(ids + first_token + i, tl.where(known >= 0, known, last_id), mask=inside)
            tl.store(positions + first_token + i, position, mask=inside)
            tl.store(slots + first_token + i, block * PAGE + position % PAGE, mask=inside)

        num_blocks = (end + PAGE - 1) // PAGE
        step_table = tables + place.to(tl.int64) * most_blocks
        for begin in range(0, num_blocks, BLOCK):
            i = begin + lanes
            tl.store(step_table + i, tl.load(table + i, mask=i < num_blocks), mask=i < num_blocks)
        tl.store(context_lens + place, end)


@triton.jit(do_not_specialize=["num_sampled"])
def _remember_sampled(last_ids, sampled, rows, num_sampled, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = i < num_sampled
    row = tl.load(rows + i, mask=inside, other=0)
    tl.store(last_ids + row, tl.maximum(tl.load(sampled + i, mask=inside, other=0), 0), mask=inside)


def prepare_step(
    packet: Tensor,
    last_ids: Tensor,
    row_tables: Tensor,
    ids: Tensor,
    positions: Tensor,
    slots: Tensor,
    context_lens: Tensor,
    tables: Tensor,
    block_size: int,
) -> None:
    """Everything is int32 and contiguous. Of the state: last_ids: [all rows]; row_tables: [all rows, most blocks], to
    which the new blocks are added. Of the step: ids, positions, slots: [most tokens]; context_lens: [most rows], the
    step's tokens included; tables: [most rows, most blocks], of which only a row's own blocks are written. A row may
    stand in a packet once.
    """
    assert tables.shape[1] == row_tables.shape[1], (tables.shape, row_tables.shape)
    _prepare_step[(len(context_lens) + 1,)](
        packet,
        last_ids,
        row_tables,
        ids,
        positions,
        slots,
        context_lens,
        tables,
        len(ids),
        tables.shape[1],
        PAGE=block_size,
        HEADER=_HEADER,
        RECORD=_RECORD,
        BLOCK=_BLOCK,
        num_warps=1,
    )


def remember_sampled(last_ids: Tensor, sampled: Tensor, rows: Tensor) -> None:
    """Keeps what rows drew for the next step. drawn, rows: [drawn] int32; -1, which is no id, is kept as 0. Where a row
    stands more than once, any of its ids may stay: the host sends the next one itself."""
    _remember_sampled[(triton.cdiv(len(rows), _BLOCK),)](last_ids, sampled, rows, len(rows), BLOCK=_BLOCK, num_warps=4)


def _integers(*shape: int) -> Tensor:
    return shaped(*shape, dtype=torch.int32)


def _variant(block_size: int) -> Variant:
    def launch(rows: int) -> None:
        tokens, tables = _integers(40 * rows), _integers(rows, 700)
        step = (tokens, tokens, tokens, _integers(rows), tables)
        prepare_step(_integers(1000), _integers(256), _integers(256, 700), *step, block_size)

    return Variant(name=f"prepare_step page {block_size}", launch=launch, plans={"_prepare_step": Plan()})


VARIANTS = (
    _variant(64),
    Variant(
        name="remember_sampled",
        launch=lambda rows: remember_sampled(_integers(256), _integers(rows), _integers(rows)),
        plans={"_remember_sampled": Plan()},
    ),
)
