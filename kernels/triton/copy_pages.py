"""Copies pages of the KV cache, listed by the host and in part chosen on the device.

It runs rarely, so it is not part of a CUDA graph. A list is one array of int32: an entry of `_ENTRY` for each target,
and then sources:

    row, number of sources, target, offset of the first source

Without a row (-1) there is one source. With a row, as many draft tokens of the row as were accepted say which of its
sources is copied, each as many places behind the one before as the list says; if all were, none is.
"""

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray
from torch import Tensor

from .variant import WIDE, Variant, shaped

_ENTRY = 4
_BLOCK = 1024  # words of 8 bytes that a program copies


def fill_copies(pairs: NDArray[np.int32]) -> NDArray[np.int32]:
    """A list without rows. pairs: [copies, 2] source, target."""
    num = len(pairs)
    entries = np.empty((num, _ENTRY), np.int32)
    entries[:, 0], entries[:, 1], entries[:, 2], entries[:, 3] = -1, 1, pairs[:, 1], _ENTRY * num + np.arange(num)
    return np.concatenate((entries.reshape(-1), pairs[:, 0]))


def fill_choices(
    rows: NDArray[np.int64], nums: NDArray[np.int64], sources: NDArray[np.int32], targets: NDArray[np.int32]
) -> NDArray[np.int32]:
    """A list whose sources are k apart. rows: [rows]; nums: [rows] draft tokens of each; sources: [sum of nums, k]
    pages, row after row; targets: [rows, k]."""
    num, pages = targets.shape
    entries = np.empty((num, pages, _ENTRY), np.int32)
    entries[..., 0], entries[..., 1], entries[..., 2] = rows[:, None], nums[:, None], targets
    firsts = (np.cumsum(nums) - nums)[:, None] * pages + np.arange(pages)
    entries[..., 3] = entries.size + firsts
    return np.concatenate((entries.reshape(-1), sources.reshape(-1)))


@triton.jit
def _copy_pages(memory, copies, accepted, words, between, ENTRY: tl.constexpr, BLOCK: tl.constexpr):
    """One program for each part of an entry."""
    entry = copies + tl.program_id(0) * ENTRY
    row = tl.load(entry)
    chosen = tl.load(accepted + row, mask=row >= 0, other=0)
    if chosen < tl.load(entry + 1):
        source = tl.load(copies + tl.load(entry + 3) + chosen * between).to(tl.int64) * words
        target = tl.load(entry + 2).to(tl.int64) * words
        i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        tl.store(memory + target + i, tl.load(memory + source + i, mask=i < words), mask=i < words)


def copy_pages(memory: Tensor, copies: Tensor, num: int, accepted: Tensor, *, between: int = 0) -> None:
    """memory: [pages, words] int64, contiguous; copies: int32, a list of `num` entries, of which no source is a target
    and no target occurs twice; accepted: [rows] int32, of `accept_drafts`; between: from a source of a row to its next
    one."""
    assert memory.is_contiguous(), memory.stride()
    words = memory.shape[1]
    if num and words:
        _copy_pages[(num, triton.cdiv(words, _BLOCK))](
            memory, copies, accepted, words, between, ENTRY=_ENTRY, BLOCK=_BLOCK, num_warps=4
        )


def _launch(rows: int) -> None:
    copies, accepted = shaped(4096, dtype=torch.int32), shaped(256, dtype=torch.int32)
    copy_pages(shaped(64, 1 << 14, dtype=torch.int64), copies, rows, accepted)


VARIANTS = (Variant(name="copy_pages", launch=_launch, plans={"_copy_pages": WIDE}),)
