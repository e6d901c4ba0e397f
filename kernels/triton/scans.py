"""Recurrent mixers on a GPU, with the functions of `reference_scans`. Results have the type of the activations.

`conv`, `scan_mamba1` and the scans of linear attention by steps take one position after another, as the reference does,
so their bits do not depend on how a sequence is cut. `scan_delta`, `scan_mamba2` and `scan_lightning` compute steps
with long rows in chunks, with products of matrices (section 3 of arXiv 2412.06464; section 6 of arXiv 2405.21060).

The rows of a step are described by a table on the device, which the kernels read. A recorded launch therefore serves
every step whose table is sent to the same memory. A table is one int32 array, which begins as far behind a given place
as the number at that place says; `fill_states` writes it:

    rows, offset of the chunks, offset of the pages, chunks
    for each row, and for an end behind the last one: its first chunk, the state that it reads (-1: zeros)
    for each chunk of at most CHUNK tokens: its first token, the one after its last, the state that it writes (-1: none)
    for each state: its pages

A row has at least one chunk, whose tokens may be none. Rows are cut where their states are kept.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray
from torch import Tensor

from ..lanes import LANES
from ..reference_scans import Act
from ..states import StateRows, Tiles
from .variant import Plan, Variant, shaped

CHUNK = 16  # larger ones need more registers than there are
_HEADER = 4
_ROWS_AT = tl.constexpr(_HEADER)
_WARPS = 4
_ACTS = {"none": 0, "silu": 1, "sigmoid": 2}
_LIGHTNING, _MAMBA2, _DELTA, _DELTA_BY_KEY = (tl.constexpr(kind) for kind in range(4))


@dataclass(frozen=True, eq=False, kw_only=True)
class StateTable:
    """The rows of a step, and where their states are."""

    memory: Tensor  # [pages, page bytes] uint8
    place: Tensor  # int32, on the device: its first number says how far behind it the table begins
    num_rows: int  # at most: a step that is padded has fewer in its table
    num_pages: int  # of a state
    is_long: bool  # the scans that can compute in chunks do so

    @staticmethod
    def of(rows: StateRows, *, is_long: bool) -> "StateTable":
        num_rows, num_pages = rows.read.shape
        num_tokens = int(rows.counts.sum())
        filled = np.zeros(_HEADER + states_size(rows=num_rows, tokens=num_tokens, pages=num_pages), np.int32)
        filled[0] = _HEADER
        fill_states(filled[_HEADER:], rows)
        place = torch.from_numpy(filled).to(rows.memory.device)
        return StateTable(memory=rows.memory, place=place, num_rows=num_rows, num_pages=num_pages, is_long=is_long)


def states_size(*, rows: int, tokens: int, pages: int) -> int:
    """The most int32 that the table of a step takes whose states have so many pages."""
    return _HEADER + 2 * (rows + 1) + 3 * (rows + tokens) + pages * (2 * rows + tokens)


def fill_states(table: NDArray[np.int32], rows: StateRows) -> int:
    """Writes a step's table and returns its length. The memory of `rows` is not used."""
    counts, read, written, kept, keep_counts, keep_pages = (
        part.numpy()
        for part in (rows.counts, rows.read, rows.written, rows.keep_rows, rows.keep_counts, rows.keep_pages)
    )
    num, each = len(counts), np.arange(len(counts))
    # A row is cut into segments, each of which ends with a state that is stored.
    order = np.argsort(np.concatenate((kept, each)), kind="stable")
    row = np.concatenate((kept, each))[order]
    end = np.concatenate((keep_counts, counts))[order]
    state = np.concatenate((num + np.arange(len(kept)), each))[order]
    is_first = np.diff(row, prepend=-1) != 0
    begin = np.where(is_first, 0, np.roll(end, 1))
    num_chunks = np.maximum(1, -(-(end - begin) // CHUNK))
    bounds = np.cumsum(num_chunks)
    total = int(num_chunks.sum())

    is_own, is_none = (read == written).all(axis=1), (read < 0).all(axis=1)
    others = np.flatnonzero(~is_own & ~is_none)
    first_state = np.where(is_own, each, -1)
    first_state[others] = num + len(kept) + np.arange(len(others))
    pages = np.concatenate((written, keep_pages, read[others]))

    chunks_at = _HEADER + 2 * (num + 1)
    pages_at = chunks_at + 3 * total
    table[:_HEADER] = num, chunks_at, pages_at, total
    records = table[_HEADER:chunks_at].reshape(-1, 2)
    records[:num, 0], records[num, 0] = (bounds - num_chunks)[is_first], total
    records[:num, 1], records[num, 1] = first_state, -1
    chunks = table[chunks_at:pages_at].reshape(-1, 3)
    first_token = (np.cumsum(counts) - counts)[row]
    segment = np.repeat(np.arange(len(row)), num_chunks)
    in_segment = np.arange(total) - (bounds - num_chunks)[segment]
    chunks[:, 0] = (first_token + begin)[segment] + CHUNK * in_segment
    chunks[:, 1] = np.minimum(chunks[:, 0] + CHUNK, (first_token + end)[segment])
    chunks[:, 2] = -1
    chunks[bounds - 1, 2] = state
    length = pages_at + pages.size
    table[pages_at:length] = pages.reshape(-1)
    return length


class _States(NamedTuple):
    """The arguments of a kernel that say where states lie."""

    place: Tensor
    memory: Tensor  # [pages, words of a page] float32
    page_words: int
    shelves: Tensor
    offsets: Tensor  # bytes
    per_tile: int
    num_pages: int


def _states(rows: StateTable, tiles: Tiles) -> _States:
    memory = rows.memory.view(torch.float32)
    shelves, offsets = tiles.shelves.to(memory.device), tiles.offsets.to(memory.device)
    return _States(rows.place, memory, memory.stride(0), shelves, offsets, tiles.per_tile, rows.num_pages)


@triton.jit
def _softplus(x):
    # log(1 + u) · u / ((1 + u) - 1) is log1p(u) without its rounding error.
    u = tl.exp(-tl.abs(x))
    sum = 1.0 + u
    small = tl.where(sum == 1.0, u, tl.log(sum) * (u / tl.where(sum == 1.0, 1.0, sum - 1.0)))
    return tl.maximum(x, 0.0) + small


@triton.jit
def _row(table, row):
    """A row's first chunk, the one after its last, and the state that it reads. A row beyond the last has no chunks."""
    record, inside = table + _ROWS_AT + 2 * row, row < tl.load(table)
    first, end = tl.load(record, mask=inside, other=0), tl.load(record + 2, mask=inside, other=0)
    return first, end, tl.load(record + 1, mask=inside, other=-1)


@triton.jit
def _place(pages, state, unit, page_words, shelves, offsets, per_tile, num_pages):
    """The word at which a unit of a state begins in memory, and whether there is one."""
    tile = unit // per_tile
    page = tl.load(pages + state * num_pages + tl.load(shelves + tile), mask=state >= 0, other=-1)
    words = tl.load(offsets + tile) // 4
    return tl.maximum(page, 0).to(tl.int64) * page_words + words, page >= 0


@triton.jit
def _decays(head, token, decay, decay_stride, a, dt_bias, low, high, inside, KIND: tl.constexpr):
    """The logarithm of a head's decay at tokens, and Mamba's step."""
    if KIND == _LIGHTNING:
        step = tl.zeros_like(token).to(tl.float32)
        log = step + tl.log(tl.load(decay + head))
    else:
        raw = tl.load(decay + token.to(tl.int64) * decay_stride + head, mask=inside, other=0.0).to(tl.float32)
        if dt_bias is not None:
            raw += tl.load(dt_bias + head)
        step = _softplus(raw)
        if KIND == _MAMBA2:
            step = tl.minimum(tl.maximum(step, low), high)
        log = step * tl.load(a + head)
    return log, step


@triton.jit
def _step_scan(
    q, k, v, beta, decay, a, dt_bias, d, out, q_stride, k_stride, v_stride, beta_stride, decay_stride, scale,
    beta_scale, low, high, table, memory, page_words, shelves, offsets, per_tile, num_pages,
    HEADS: tl.constexpr, SHARE: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    table += tl.load(table)
    row = tl.program_id(0)
    first_chunk, end_chunk, first_state = _row(table, row)
    chunks, pages = table + tl.load(table + 1), table + tl.load(table + 2)
    head = tl.program_id(1)
    i, j = tl.arange(0, BLOCK_K), tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
    in_keys, in_values = i < KEYS, j < VALUES
    inner = (head % per_tile) * KEYS * VALUES + i[:, None] * VALUES + j[None, :]
    inside = in_keys[:, None] & in_values[None, :]
    place, exists = _place(pages, first_state, head, page_words, shelves, offsets, per_tile, num_pages)
    state = tl.load(memory + place + inner, mask=inside & exists, other=0.0)
    group = head // SHARE
    for chunk in range(first_chunk, end_chunk):
        first = tl.load(chunks + 3 * chunk)
        for t in range(tl.load(chunks + 3 * chunk + 1) - first):
            token = first.to(tl.int64) + t
            query = tl.load(q + token * q_stride + group * KEYS + i, mask=in_keys, other=0.0).to(tl.float32)
            key = tl.load(k + token * k_stride + group * KEYS + i, mask=in_keys, other=0.0).to(tl.float32)
            value = tl.load(v + token * v_stride + head * VALUES + j, mask=in_values, other=0.0).to(tl.float32)
            if KIND == _DELTA_BY_KEY:
                raw = tl.load(decay + token * decay_stride + head * KEYS + i, mask=in_keys, other=0.0).to(tl.float32)
                raw += tl.load(dt_bias + head * KEYS + i, mask=in_keys, other=0.0)
                state *= tl.exp(tl.load(a + head) * _softplus(raw))[:, None]
            elif KIND == _LIGHTNING:
                state *= tl.load(decay + head)
            else:
                log, step = _decays(head, first + t, decay, decay_stride, a, dt_bias, low, high, True, KIND)
                state *= tl.exp(log)
                if KIND == _MAMBA2:
                    key *= step
            change = value
            if KIND >= _DELTA:
                query *= tl.rsqrt(tl.sum(query * query, axis=0) + 1e-6) * scale
                key *= tl.rsqrt(tl.sum(key * key, axis=0) + 1e-6)
                rate = beta_scale * tl.sigmoid(tl.load(beta + token * beta_stride + head).to(tl.float32))
                change = (value - tl.sum(state * key[:, None], axis=0)) * rate
            state += key[:, None] * change[None, :]
            result = tl.sum(state * query[:, None], axis=0)
            if d is not None:
                result += value * tl.load(d + head)
            tl.store(out + (token * HEADS + head) * VALUES + j, result, mask=in_values)
        last_state = tl.load(chunks + 3 * chunk + 2)
        place, exists = _place(pages, last_state, head, page_words, shelves, offsets, per_tile, num_pages)
        tl.store(memory + place + inner, state, mask=inside & exists)


@triton.jit
def _prepare_chunk(
    k, v, beta, decay, a, dt_bias, added, seen, table, k_stride, v_stride, beta_stride, decay_stride, beta_scale,
    HEADS: tl.constexpr, SHARE: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr, CHUNK: tl.constexpr, KIND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """What each position of a chunk adds to the state depends on what those before it have added: a triangular system,
    whose solution is `added` less `seen` times the state before the chunk. A program takes every n-th chunk."""
    table += tl.load(table)
    chunks, head = table + tl.load(table + 1), tl.program_id(1)
    n, i, j = tl.arange(0, CHUNK), tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_V)
    before = n[:, None] > n[None, :]
    for chunk in range(tl.program_id(0), tl.load(table + 3), tl.num_programs(0)):
        first, end = tl.load(chunks + 3 * chunk), tl.load(chunks + 3 * chunk + 1)
        token = (first + n).to(tl.int64)
        inside = first + n < end
        log, _ = _decays(head, first + n, decay, decay_stride, a, dt_bias, 0.0, 0.0, inside, KIND)
        total = tl.cumsum(tl.where(inside, log, 0.0), axis=0)
        rate = tl.load(beta + token * beta_stride + head, mask=inside, other=0.0).to(tl.float32)
        rate = beta_scale * tl.sigmoid(rate)
        mask = inside[:, None] & (i < KEYS)[None, :]
        address = k + token[:, None] * k_stride + (head // SHARE) * KEYS + i[None, :]
        key = tl.load(address, mask=mask, other=0.0).to(tl.float32)
        key *= tl.rsqrt(tl.sum(key * key, axis=1) + 1e-6)[:, None]
        between = tl.exp(tl.where(before, total[:, None] - total[None, :], 0.0))
        products = tl.dot(key * rate[:, None], tl.trans(key), input_precision=PRECISION) * between
        inverse = tl.where(before & inside[:, None], -products, 0.0)
        for at in range(1, CHUNK):  # forward substitution; the rows above `at` are those of the inverse
            line = tl.sum(tl.where((n == at)[:, None], inverse, 0.0), axis=0)
            line += tl.sum(line[:, None] * inverse, axis=0)
            inverse = tl.where((n == at)[:, None], line[None, :], inverse)
        inverse += tl.where(n[:, None] == n[None, :], 1.0, 0.0)
        address = v + token[:, None] * v_stride + head * VALUES + j[None, :]
        of_values = inside[:, None] & (j < VALUES)[None, :]
        value = tl.load(address, mask=of_values, other=0.0).to(tl.float32) * rate[:, None]
        out = (token[:, None] * HEADS + head) * VALUES + j[None, :]
        tl.store(added + out, tl.dot(inverse, value, input_precision=PRECISION), mask=of_values)
        share = tl.dot(inverse, key * (rate * tl.exp(total))[:, None], input_precision=PRECISION)
        tl.store(seen + (token[:, None] * HEADS + head) * KEYS + i[None, :], share, mask=mask)


@triton.jit
def _chunk_scan(
    q, k, v, added, seen, decay, a, dt_bias, d, out, q_stride, k_stride, v_stride, decay_stride, scale, low, high,
    table, memory, page_words, shelves, offsets, per_tile, num_pages,
    HEADS: tl.constexpr, SHARE: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr, CHUNK: tl.constexpr, KIND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    table += tl.load(table)
    row = tl.program_id(0)
    first_chunk, end_chunk, first_state = _row(table, row)
    chunks, pages = table + tl.load(table + 1), table + tl.load(table + 2)
    head = tl.program_id(1)
    n, i, j = tl.arange(0, CHUNK), tl.arange(0, BLOCK_K), tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
    in_keys, in_values = i < KEYS, j < VALUES
    inner = (head % per_tile) * KEYS * VALUES + i[:, None] * VALUES + j[None, :]
    of_state = in_keys[:, None] & in_values[None, :]
    place, exists = _place(pages, first_state, head, page_words, shelves, offsets, per_tile, num_pages)
    state = tl.load(memory + place + inner, mask=of_state & exists, other=0.0)
    group = head // SHARE
    for chunk in range(first_chunk, end_chunk):
        first, end = tl.load(chunks + 3 * chunk), tl.load(chunks + 3 * chunk + 1)
        token = (first + n).to(tl.int64)
        inside = first + n < end
        log, step = _decays(head, first + n, decay, decay_stride, a, dt_bias, low, high, inside, KIND)
        log = tl.where(inside, log, 0.0)
        total, whole = tl.cumsum(log, axis=0), tl.sum(log, axis=0)
        of_keys, of_values = inside[:, None] & in_keys[None, :], inside[:, None] & in_values[None, :]
        at_key = group * KEYS + i[None, :]
        query = tl.load(q + token[:, None] * q_stride + at_key, mask=of_keys, other=0.0).to(tl.float32)
        key = tl.load(k + token[:, None] * k_stride + at_key, mask=of_keys, other=0.0).to(tl.float32)
        value = tl.load(v + token[:, None] * v_stride + head * VALUES + j[None, :], mask=of_values, other=0.0)
        change = value.to(tl.float32)
        if KIND == _MAMBA2:
            key *= step[:, None]
        if KIND == _DELTA:
            query *= (tl.rsqrt(tl.sum(query * query, axis=1) + 1e-6) * scale)[:, None]
            key *= tl.rsqrt(tl.sum(key * key, axis=1) + 1e-6)[:, None]
            address = (token[:, None] * HEADS + head) * VALUES + j[None, :]
            change = tl.load(added + address, mask=of_values, other=0.0)
            address = (token[:, None] * HEADS + head) * KEYS + i[None, :]
            keys_seen = tl.load(seen + address, mask=of_keys, other=0.0)
            change -= tl.dot(keys_seen, state, input_precision=PRECISION)
        upto = n[:, None] >= n[None, :]
        between = tl.where(upto, tl.exp(tl.where(upto, total[:, None] - total[None, :], 0.0)), 0.0)
        scores = tl.dot(query, tl.trans(key), input_precision=PRECISION) * between
        result = tl.dot(query * tl.exp(total)[:, None], state, input_precision=PRECISION)
        result += tl.dot(scores, change, input_precision=PRECISION)
        if d is not None:
            result += value.to(tl.float32) * tl.load(d + head)
        tl.store(out + (token[:, None] * HEADS + head) * VALUES + j[None, :], result, mask=of_values)
        state *= tl.exp(whole)
        state += tl.dot(tl.trans(key * tl.exp(whole - total)[:, None]), change, input_precision=PRECISION)
        last_state = tl.load(chunks + 3 * chunk + 2)
        place, exists = _place(pages, last_state, head, page_words, shelves, offsets, per_tile, num_pages)
        tl.store(memory + place + inner, state, mask=of_state & exists)


@triton.jit
def _mamba1(
    x, dt, b, c, a, dt_bias, d, out, x_stride, dt_stride, b_stride, c_stride,
    table, memory, page_words, shelves, offsets, per_tile, num_pages,
    CHANNELS: tl.constexpr, N: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    table += tl.load(table)
    row = tl.program_id(0)
    first_chunk, end_chunk, first_state = _row(table, row)
    chunks, pages = table + tl.load(table + 1), table + tl.load(table + 2)
    channel, n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, BLOCK_N)
    group, inside = channel // LANES, channel < CHANNELS
    of_state, of_n = (n < N)[:, None] & (group * LANES < CHANNELS)[None, :], n < N
    # The padding of the last group is part of its state.
    unit = tl.minimum(group, (CHANNELS - 1) // LANES)
    inner = n[:, None] * LANES + (channel % LANES)[None, :]
    in_tile = (unit % per_tile)[None, :] * N * LANES + inner
    rates = tl.load(a + group[None, :] * N * LANES + inner, mask=of_state, other=0.0)
    place, exists = _place(pages, first_state, unit, page_words, shelves, offsets, per_tile, num_pages)
    state = tl.load(memory + place[None, :] + in_tile, mask=of_state & exists[None, :], other=0.0)
    for chunk in range(first_chunk, end_chunk):
        first = tl.load(chunks + 3 * chunk)
        for t in range(tl.load(chunks + 3 * chunk + 1) - first):
            token = first.to(tl.int64) + t
            value = tl.load(x + token * x_stride + channel, mask=inside, other=0.0).to(tl.float32)
            raw = tl.load(dt + token * dt_stride + channel, mask=inside, other=0.0).to(tl.float32)
            if dt_bias is not None:
                raw += tl.load(dt_bias + channel, mask=inside, other=0.0)
            step = _softplus(raw)
            key = tl.load(b + token * b_stride + n, mask=of_n, other=0.0).to(tl.float32)
            query = tl.load(c + token * c_stride + n, mask=of_n, other=0.0).to(tl.float32)
            state = state * tl.exp(rates * step[None, :]) + step[None, :] * key[:, None] * value[None, :]
            result = tl.sum(state * query[:, None], axis=0)
            if d is not None:
                result += value * tl.load(d + channel, mask=inside, other=0.0)
            tl.store(out + token * CHANNELS + channel, result, mask=inside)
        last_state = tl.load(chunks + 3 * chunk + 2)
        place, exists = _place(pages, last_state, unit, page_words, shelves, offsets, per_tile, num_pages)
        tl.store(memory + place[None, :] + in_tile, state, mask=of_state & exists[None, :])


@triton.jit
def _conv(
    x, weight, bias, out, x_stride, table, memory, page_words, shelves, offsets, per_tile, num_pages,
    CHANNELS: tl.constexpr, TAPS: tl.constexpr, BLOCK: tl.constexpr, TOKENS: tl.constexpr, ACT: tl.constexpr,
):  # fmt: skip
    table += tl.load(table)
    row = tl.program_id(0)
    first_chunk, end_chunk, first_state = _row(table, row)
    chunks, pages = table + tl.load(table + 1), table + tl.load(table + 2)
    channel, n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, TOKENS)
    inside = channel < CHANNELS
    place, exists = _place(pages, first_state, 0, page_words, shelves, offsets, per_tile, num_pages)
    has_chunks = first_chunk < end_chunk
    first = tl.load(chunks + 3 * first_chunk, mask=has_chunks, other=0)
    end = tl.load(chunks + 3 * end_chunk - 2, mask=has_chunks, other=0)
    for start in range(first, end, TOKENS):
        t = start + n
        total = tl.zeros((TOKENS, BLOCK), tl.float32)
        for tap in tl.static_range(TAPS):
            at = t - (TAPS - 1) + tap
            new = (at >= first) & (at < end)
            old = (at < first) & exists
            value = tl.load(
                x + at[:, None].to(tl.int64) * x_stride + channel[None, :],
                mask=new[:, None] & inside[None, :],
                other=0.0,
            ).to(tl.float32)
            past = place + (at - first + TAPS - 1)[:, None] * CHANNELS + channel[None, :]
            value += tl.load(memory + past, mask=old[:, None] & inside[None, :], other=0.0)
            total += value * tl.load(weight + tap * CHANNELS + channel, mask=inside, other=0.0)[None, :]
        if bias is not None:
            total += tl.load(bias + channel, mask=inside, other=0.0)[None, :]
        if ACT == 1:
            total *= tl.sigmoid(total)
        elif ACT == 2:
            total = tl.sigmoid(total)
        address = out + t[:, None].to(tl.int64) * CHANNELS + channel[None, :]
        tl.store(address, total, mask=(t < end)[:, None] & inside[None, :])
    for chunk in range(first_chunk, end_chunk):
        last_state = tl.load(chunks + 3 * chunk + 2)
        target, is_kept = _place(pages, last_state, 0, page_words, shelves, offsets, per_tile, num_pages)
        last = tl.load(chunks + 3 * chunk + 1)
        # In this order, because the state that is read may be the one that is written.
        for tap in tl.static_range(TAPS - 1):
            at = last - (TAPS - 1) + tap
            new = tl.load(x + at.to(tl.int64) * x_stride + channel, mask=inside & (at >= first), other=0.0)
            past = memory + place + (at - first + TAPS - 1) * CHANNELS + channel
            value = new.to(tl.float32) + tl.load(past, mask=inside & (at < first) & exists, other=0.0)
            tl.store(memory + target + tap * CHANNELS + channel, value, mask=inside & is_kept)


def conv(x: Tensor, weight: Tensor, bias: Tensor | None, act: Act, rows: StateTable, tiles: Tiles) -> Tensor:
    taps, channels = weight.shape
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    states = _states(rows, tiles)
    block = min(triton.next_power_of_2(channels), 128)
    grid = (rows.num_rows, triton.cdiv(channels, block))
    if grid[0]:
        _conv[grid](
            x, weight, bias, out, x.stride(0), *states,
            CHANNELS=channels, TAPS=taps, BLOCK=block, TOKENS=16, ACT=_ACTS[act],
        )  # fmt: skip
    return out


def scan_mamba1(
    x: Tensor, dt: Tensor, b: Tensor, c: Tensor, a: Tensor, dt_bias: Tensor | None, d: Tensor | None,
    rows: StateTable, tiles: Tiles,
) -> Tensor:  # fmt: skip
    channels, n = x.shape[1], b.shape[1]
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    states = _states(rows, tiles)
    grid = (rows.num_rows, triton.cdiv(channels, 64))
    if grid[0]:
        _mamba1[grid](
            x, dt, b, c, a, dt_bias, d, out, x.stride(0), dt.stride(0), b.stride(0), c.stride(0), *states,
            CHANNELS=channels, N=n, BLOCK_N=triton.next_power_of_2(n), BLOCK=64, LANES=LANES,
        )  # fmt: skip
    return out


def scan_delta(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, decay: Tensor, a: Tensor, dt_bias: Tensor, rows: StateTable,
    tiles: Tiles, beta_scale: float = 1.0,
) -> Tensor:  # fmt: skip
    kind = _DELTA if decay.dim() == 2 else _DELTA_BY_KEY
    return _linear(q, k, v, beta, decay, a, dt_bias, None, (0.0, 0.0), rows, tiles, kind, beta_scale)


def scan_mamba2(
    x: Tensor, b: Tensor, c: Tensor, dt: Tensor, a: Tensor, dt_bias: Tensor | None, d: Tensor | None,
    dt_limits: tuple[float, float], rows: StateTable, tiles: Tiles,
) -> Tensor:  # fmt: skip
    return _linear(c, b, x, None, dt, a, dt_bias, d, dt_limits, rows, tiles, _MAMBA2)


def scan_lightning(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, rows: StateTable, tiles: Tiles) -> Tensor:
    return _linear(q, k, v, None, decay, None, None, None, (0.0, 0.0), rows, tiles, _LIGHTNING)


def _linear(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor | None, decay: Tensor, a: Tensor | None, dt_bias: Tensor | None,
    d: Tensor | None, limits: tuple[float, float], rows: StateTable, tiles: Tiles, kind: tl.constexpr,
    beta_scale: float = 1.0,
) -> Tensor:  # fmt: skip
    heads, keys, values = v.shape[1], q.shape[2], v.shape[2]
    out = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    states = _states(rows, tiles)
    block_k, block_v = max(triton.next_power_of_2(keys), 16), min(max(triton.next_power_of_2(values), 16), 32)
    grid = (rows.num_rows, heads, triton.cdiv(values, block_v))
    if not grid[0]:
        return out
    shape = {
        "HEADS": heads, "SHARE": heads // q.shape[1], "KEYS": keys, "VALUES": values, "BLOCK_K": block_k, "KIND": kind,
    }  # fmt: skip
    scale, low, high = keys**-0.5, limits[0], min(limits[1], torch.finfo(torch.float32).max)
    decay_stride, beta_stride = decay.stride(0), beta.stride(0) if beta is not None else 0
    if not rows.is_long or kind == _DELTA_BY_KEY:
        _step_scan[grid](
            q, k, v, beta, decay, a, dt_bias, d, out, q.stride(0), k.stride(0), v.stride(0), beta_stride, decay_stride,
            scale, beta_scale, low, high, *states, BLOCK_V=block_v, **shape,
        )  # fmt: skip
        return out
    # Three products of tf32 are about as exact as one of float32. One has 3 bits more than activations of bfloat16.
    chunks = {
        "CHUNK": CHUNK,
        "PRECISION": "tf32x3" if q.dtype == torch.float32 else "tf32",
        "num_warps": _WARPS,
        "num_stages": 1,
    }
    added = seen = None
    if kind == _DELTA:
        added, seen = (v.new_empty((v.shape[0], heads, n), dtype=torch.float32) for n in (values, keys))
        whole_v = max(triton.next_power_of_2(values), 16)
        _prepare_chunk[(rows.num_rows + v.shape[0] // CHUNK, heads)](
            k, v, beta, decay, a, dt_bias, added, seen, states.place, k.stride(0), v.stride(0), beta_stride,
            decay_stride, beta_scale, BLOCK_V=whole_v, **shape, **chunks,
        )  # fmt: skip
    _chunk_scan[grid](
        q, k, v, added, seen, decay, a, dt_bias, d, out, q.stride(0), k.stride(0), v.stride(0), decay_stride, scale,
        low, high, *states, BLOCK_V=block_v, **shape, **chunks,
    )  # fmt: skip
    return out


def _some_rows(rows: int, tokens: int, units: int, words: int) -> tuple[StateTable, Tiles]:
    """Rows of so many tokens, each with a state of so many units in one page."""
    memory, place = shaped(64, units * words * 4, dtype=torch.uint8), shaped(4096, dtype=torch.int32)
    tiles = Tiles(shaped(units, dtype=torch.int32), shaped(units, dtype=torch.int64), 1)
    table = StateTable(memory=memory, place=place, num_rows=rows, num_pages=1, is_long=tokens > 1)
    return table, tiles


def _float(*shape: int) -> Tensor:
    return shaped(*shape, dtype=torch.float32)


def _of_delta(tokens: int) -> Variant:
    """Qwen3.5-9B."""

    def launch(rows: int) -> None:
        n = rows * tokens
        q, k, v = shaped(n, 16, 128), shaped(n, 16, 128), shaped(n, 32, 128)
        scan_delta(
            q, k, v, shaped(n, 32), shaped(n, 32), _float(32), _float(32), *_some_rows(rows, tokens, 32, 128 * 128)
        )

    kernels = {"_step_scan": Plan()} if tokens == 1 else {"_prepare_chunk": _PRODUCTS, "_chunk_scan": _PRODUCTS}
    return Variant(name=f"scan_delta bf16 32 128x128 of {tokens}", launch=launch, plans=kernels)


def _of_mamba2(tokens: int) -> Variant:
    """Nemotron-H-8B."""

    def launch(rows: int) -> None:
        n = rows * tokens
        x, b, c, dt = shaped(n, 128, 64), shaped(n, 8, 128), shaped(n, 8, 128), shaped(n, 128)
        weights = _float(128), _float(128), _float(128)
        scan_mamba2(x, b, c, dt, *weights, (0.0, math.inf), *_some_rows(rows, tokens, 128, 128 * 64))

    kernels = {"_step_scan": Plan()} if tokens == 1 else {"_chunk_scan": _PRODUCTS}
    return Variant(name=f"scan_mamba2 bf16 128 128x64 of {tokens}", launch=launch, plans=kernels)


def _launch_lightning(rows: int) -> None:
    q, k, v = (shaped(rows * 100, 64, 128) for _ in range(3))
    scan_lightning(q, k, v, _float(64), *_some_rows(rows, 100, 64, 128 * 128))


def _launch_mamba1(rows: int) -> None:
    x, dt, b, c = (shaped(rows, width) for width in (8192, 8192, 16, 16))
    scan_mamba1(x, dt, b, c, _float(512, 16, 16), _float(8192), _float(8192), *_some_rows(rows, 1, 512, 16 * 16))


def _launch_conv(rows: int) -> None:
    conv(shaped(rows, 8192), _float(4, 8192), None, "silu", *_some_rows(rows, 1, 1, 3 * 8192))


_PRODUCTS = Plan(sm_80=("HMMA",), sm_90=("HMMA",))
VARIANTS = (
    *(_of_delta(tokens) for tokens in (1, 100)),
    *(_of_mamba2(tokens) for tokens in (1, 100)),
    Variant(name="scan_lightning bf16 64 128x128 of 100", launch=_launch_lightning, plans={"_chunk_scan": _PRODUCTS}),
    Variant(name="scan_mamba1 bf16 8192 16", launch=_launch_mamba1, plans={"_mamba1": Plan()}),
    Variant(name="conv bf16 8192 4", launch=_launch_conv, plans={"_conv": Plan()}),
)
