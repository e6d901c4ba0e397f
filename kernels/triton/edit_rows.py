"""Writes what few requests have into the columns that `edit_logits.py` reads: biases, and histories for penalties.

It runs rarely, so it is not part of a CUDA graph. The host lists what it changes in one array of int32: a record of
`_RECORD` for each edit, and then keys and values of all edits, floats as their bits:

    kind, row or history, offset of the keys, number of keys; the values follow the keys
    kind 0: the row's bias: token ids, what is added to their logits
    kind 1: the prompt of a history: indices of its words with a bit, the words
    kind 2: the output of a history: token ids, how often each was sampled

An edit replaces what there was.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray
from torch import Tensor

from .edit_logits import EditColumns
from .variant import Plan, Variant, shaped

Kind = Literal["bias", "prompt", "output"]
_KINDS: dict[Kind, int] = {"bias": 0, "prompt": 1, "output": 2}
_RECORD = 4
_BLOCK = 1024  # entries that a program writes at a time


@dataclass(frozen=True)
class Edit:
    """One record. The keys differ from each other."""

    kind: Kind
    row: int  # of a history: its index
    keys: NDArray[np.int32]
    values: NDArray[np.int32]  # of a bias: the bits of float32


def fill_edits(edits: Sequence[Edit]) -> NDArray[np.int32]:
    """The array of `edit_rows`. Empty: there are no edits."""
    sizes = [len(edit.keys) for edit in edits]
    firsts = _RECORD * len(edits) + 2 * (np.cumsum(sizes, dtype=np.int64) - sizes)
    records = [(_KINDS[edit.kind], edit.row, first, len(edit.keys)) for edit, first in zip(edits, firsts, strict=True)]
    parts = [np.array(records, np.int32).reshape(-1)]
    for edit in edits:
        parts += (edit.keys, edit.values)
    return np.concatenate(parts)


@triton.jit
def _edit_rows(
    edits,
    bias_first,
    bias_len,
    bias_ids,
    bias_values,
    prompt_bits,
    output_counts,
    vocab,
    RECORD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program per record."""
    record = edits + tl.program_id(0) * RECORD
    kind = tl.load(record)
    row = tl.load(record + 1).to(tl.int64)
    num = tl.load(record + 3)
    keys = edits + tl.load(record + 2)
    values = keys + num
    lane = tl.arange(0, BLOCK)
    if kind == 0:
        target = tl.load(bias_first + row)
        tl.store(bias_len + row, num)
        for begin in range(0, num, BLOCK):
            i = begin + lane
            tl.store(bias_ids + target + i, tl.load(keys + i, mask=i < num), mask=i < num)
            value = tl.load(values + i, mask=i < num).to(tl.float32, bitcast=True)
            tl.store(bias_values + target + i, value, mask=i < num)
    elif kind == 1:
        words = tl.cdiv(vocab, 32)
        bits = prompt_bits + row * words
        for begin in range(0, words, BLOCK):
            tl.store(bits + begin + lane, 0, mask=begin + lane < words)
        tl.debug_barrier()  # other threads write where this one has cleared
        for begin in range(0, num, BLOCK):
            i = begin + lane
            tl.store(bits + tl.load(keys + i, mask=i < num, other=0), tl.load(values + i, mask=i < num), mask=i < num)
    else:
        counts = output_counts + row * vocab
        for begin in range(0, vocab, BLOCK):
            tl.store(counts + begin + lane, 0, mask=begin + lane < vocab)
        tl.debug_barrier()
        for begin in range(0, num, BLOCK):
            i = begin + lane
            count = tl.load(values + i, mask=i < num, other=0).to(tl.int16)
            tl.store(counts + tl.load(keys + i, mask=i < num, other=0), count, mask=i < num)


def edit_rows(edits: Tensor, num: int, columns: EditColumns) -> None:
    """edits: int32, from `fill_edits` for `num` edits, each of another column of a row."""
    if num:
        _edit_rows[(num,)](
            edits,
            columns.bias_first,
            columns.bias_len,
            columns.bias_ids,
            columns.bias_values,
            columns.prompt_bits,
            columns.output_counts,
            columns.output_counts.shape[1],
            RECORD=_RECORD,
            BLOCK=_BLOCK,
            num_warps=4,
        )


def _launch(rows: int) -> None:
    numbers, integers = shaped(256, dtype=torch.float32), shaped(256, dtype=torch.int32)
    columns = EditColumns(
        repetition_penalty=numbers,
        presence_penalty=numbers,
        frequency_penalty=numbers,
        history=integers,
        prompt_bits=shaped(8, _VOCAB // 32, dtype=torch.int32),
        output_counts=shaped(8, _VOCAB, dtype=torch.int16),
        bias_first=integers,
        bias_len=integers,
        bias_ids=integers,
        bias_values=numbers,
    )
    edit_rows(shaped(4096, dtype=torch.int32), rows, columns)


_VOCAB = 151936  # Qwen3
VARIANTS = (Variant(name="edit_rows", launch=_launch, plans={"_edit_rows": Plan()}),)
