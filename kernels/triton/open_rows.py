"""Copies the sampling parameters of newly opened rows from the packet into the columns that sampling reads.

It runs rarely, so it is not part of a CUDA graph. An opened row is a record of `FIELDS` int32, floats as their bits:

    row, temperature, top_k, top_p, min_p, seed (low half, high half), repetition, presence and frequency penalty,
    index of its history or -1

It has no bias: `edit_rows.py` writes those.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .edit_logits import EditColumns
from .sampling import SamplingColumns
from .variant import Plan, Variant, shaped

FIELDS = 11


@triton.jit
def _float(field):
    return tl.load(field).to(tl.float32, bitcast=True)


@triton.jit
def _open_rows(
    records,
    temperature,
    top_k,
    top_p,
    min_p,
    seed,
    repetition_penalty,
    presence_penalty,
    frequency_penalty,
    history,
    bias_len,
    FIELDS: tl.constexpr,
):
    """One program per record."""
    record = records + tl.program_id(0) * FIELDS
    row = tl.load(record)
    tl.store(temperature + row, _float(record + 1))
    tl.store(top_k + row, tl.load(record + 2))
    tl.store(top_p + row, _float(record + 3))
    tl.store(min_p + row, _float(record + 4))
    low = tl.load(record + 5).to(tl.uint32, bitcast=True).to(tl.int64)
    tl.store(seed + row, (tl.load(record + 6).to(tl.int64) << 32) | low)
    tl.store(repetition_penalty + row, _float(record + 7))
    tl.store(presence_penalty + row, _float(record + 8))
    tl.store(frequency_penalty + row, _float(record + 9))
    tl.store(history + row, tl.load(record + 10))
    tl.store(bias_len + row, 0)


def open_rows(records: Tensor, num: int, sampling: SamplingColumns, edits: EditColumns) -> None:
    """records: [≥ num, FIELDS] int32 contiguous, each for a different row."""
    _open_rows[(num,)](
        records,
        sampling.temperature,
        sampling.top_k,
        sampling.top_p,
        sampling.min_p,
        sampling.seed,
        edits.repetition_penalty,
        edits.presence_penalty,
        edits.frequency_penalty,
        edits.history,
        edits.bias_len,
        FIELDS=FIELDS,
        num_warps=1,
    )


def _launch(rows: int) -> None:
    numbers, integers = shaped(256, dtype=torch.float32), shaped(256, dtype=torch.int32)
    sampling = SamplingColumns(
        temperature=numbers, top_k=integers, top_p=numbers, min_p=numbers, seed=shaped(256, dtype=torch.int64)
    )
    edits = EditColumns(
        repetition_penalty=numbers,
        presence_penalty=numbers,
        frequency_penalty=numbers,
        history=integers,
        prompt_bits=integers,
        output_counts=integers,
        bias_first=integers,
        bias_len=integers,
        bias_ids=integers,
        bias_values=numbers,
    )
    open_rows(shaped(256, FIELDS, dtype=torch.int32), rows, sampling, edits)


VARIANTS = (Variant(name="open_rows", launch=_launch, plans={"_open_rows": Plan()}),)
