"""Applies bias, penalties and grammar masks to the logits of the requests that have them, in a copy.

The raw logits are kept for log-probabilities, so only the rows with an edit cost memory and time. The semantics are
those of `engine/steps/sampler.py`: the bias is added, then the penalties apply, and infinite results are made finite. A
token whose raw logit is -inf keeps it, and a token that the grammar forbids gets -inf. A row whose raw logits hold a
NaN or +inf holds a NaN afterwards, which `sampling.py` detects.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from .variant import WIDE, Plan, Variant, shaped

_BLOCK = 2048
_ENTRIES = 128  # bias entries, or ids to count, that a program handles at a time
_MAX_COUNTED = tl.constexpr(2**15 - 1)
_GREATEST = tl.constexpr(1e30)  # replaces an infinite edited logit, so that differences stay finite


@dataclass(frozen=True, kw_only=True)
class EditColumns:
    """The edits of each row. The host writes a row when a request takes it; the device counts the sampled tokens."""

    repetition_penalty: Tensor  # [rows] float32, over prompt and output; 1: none
    presence_penalty: Tensor  # [rows] float32, over output
    frequency_penalty: Tensor  # [rows] float32, over output
    history: Tensor  # [rows] int32, the row's index into the next two; -1: no penalties
    prompt_bits: Tensor  # [histories, ⌈vocab / 32⌉] int32; bit t % 32 of word t / 32: token t is in the prompt
    output_counts: Tensor  # [histories, vocab] int16, how often each token is in the output, at most 32767
    bias_first: Tensor  # [rows] int32, index of the row's first entry in bias_ids and bias_values
    bias_len: Tensor  # [rows] int32; 0: no bias
    bias_ids: Tensor  # [entries] int32, each at most once in a row; ids beyond the vocabulary are ignored
    bias_values: Tensor  # [entries] float32


@triton.jit
def _edited(raw, biased, tokens, inside, history, bits, counts, allowed, grammar, repetition, presence, frequency):
    """The edited logits. raw, biased: before and after the bias; bits, counts, allowed: pointers to the row's data."""
    penalised = inside & (history >= 0)
    count = tl.load(counts + tokens, mask=penalised, other=0).to(tl.float32)
    word = tl.load(bits + tokens // 32, mask=penalised, other=0)
    seen = (((word >> (tokens % 32)) & 1) != 0) | (count > 0)
    x = tl.where(seen, tl.where(biased > 0, tl.div_rn(biased, repetition), biased * repetition), biased)
    x = tl.where(count > 0, x - (frequency * count + presence), x)
    x = tl.where(x < float("inf"), x, tl.where(x == x, _GREATEST, -_GREATEST))
    x = tl.where(x > float("-inf"), x, -_GREATEST)
    word = tl.load(allowed + tokens // 32, mask=inside & (grammar >= 0), other=-1)
    x = tl.where((raw > float("-inf")) & (((word >> (tokens % 32)) & 1) != 0), x, float("-inf"))
    return tl.where((raw == raw) & (raw < float("inf")), x, float("nan"))


@triton.jit
def _edit_kernel(
    edited,
    logits,
    edited_stride,
    logits_stride,
    places,
    picked,
    grammars,
    grammar_bits,
    repetition_penalty,
    presence_penalty,
    frequency_penalty,
    history,
    prompt_bits,
    output_counts,
    bias_first,
    bias_len,
    bias_ids,
    bias_values,
    vocab,
    BLOCK: tl.constexpr,
    ENTRIES: tl.constexpr,
):
    pick = tl.program_id(0)
    place = tl.load(places + pick)
    if place < 0:
        return
    row = tl.load(picked + pick)
    source = logits + pick.to(tl.int64) * logits_stride
    target = edited + place.to(tl.int64) * edited_stride
    words = tl.cdiv(vocab, 32)
    grammar = tl.load(grammars + pick)
    allowed = grammar_bits + grammar.to(tl.int64) * words
    past = tl.load(history + row)
    bits = prompt_bits + past.to(tl.int64) * words
    counts = output_counts + past.to(tl.int64) * vocab
    repetition = tl.load(repetition_penalty + row)
    presence = tl.load(presence_penalty + row)
    frequency = tl.load(frequency_penalty + row)

    first = tl.program_id(1) * BLOCK
    tokens = first + tl.arange(0, BLOCK)
    inside = tokens < vocab
    raw = tl.load(source + tokens, mask=inside, other=0.0)
    x = _edited(raw, raw, tokens, inside, past, bits, counts, allowed, grammar, repetition, presence, frequency)
    tl.store(target + tokens, x, mask=inside)

    num_biased = tl.load(bias_len + row)
    if num_biased > 0:
        tl.debug_barrier()  # the stores above come first
        entries = tl.load(bias_first + row)
        for start in range(0, num_biased, ENTRIES):
            entry = start + tl.arange(0, ENTRIES)
            listed = entry < num_biased
            ids = tl.load(bias_ids + entries + entry, mask=listed, other=0)
            bias = tl.load(bias_values + entries + entry, mask=listed, other=0.0)
            mine = listed & (ids >= first) & (ids < tl.minimum(first + BLOCK, vocab))
            own = tl.load(source + ids, mask=mine, other=0.0)
            value = _edited(
                own, own + bias, ids, mine, past, bits, counts, allowed, grammar, repetition, presence, frequency
            )
            tl.store(target + ids, value, mask=mine)


@triton.jit(do_not_specialize=["num_picked"])
def _count_kernel(ids, picked, history, output_counts, num_picked, vocab, ROWS: tl.constexpr):
    pick = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = pick < num_picked
    token = tl.load(ids + pick, mask=inside, other=-1)
    past = tl.load(history + tl.load(picked + pick, mask=inside, other=0), mask=inside, other=-1)
    counted = (token >= 0) & (past >= 0)
    count = output_counts + past.to(tl.int64) * vocab + token
    most = tl.load(count, mask=counted, other=0).to(tl.int32)
    tl.store(count, tl.minimum(most + 1, _MAX_COUNTED).to(tl.int16), mask=counted)


def edit_logits(
    edited: Tensor,
    logits: Tensor,
    places: Tensor,
    picked: Tensor,
    columns: EditColumns,
    grammars: Tensor,
    grammar_bits: Tensor,
) -> None:
    """Writes the edited logits of the picked rows that have a place in `edited`.

    logits: [picked, vocab] float32, of the rows `picked` ([picked] int32); edited: [places, vocab] float32; rows of
    both may have any stride. places: [picked] int32, -1: no edit. grammars: [picked] int32, the row of grammar_bits
    ([grammars, ⌈vocab / 32⌉] int32, a set bit allows the token) that applies; -1: all tokens are allowed. A row with
    penalties is picked at most once a step, since its counts are those of one position.
    """
    num_picked, vocab = logits.shape
    assert logits.stride(1) == edited.stride(1) == 1 and edited.shape[1] == vocab, (logits.shape, edited.shape)
    if num_picked == 0:
        return
    _edit_kernel[(num_picked, triton.cdiv(vocab, _BLOCK))](
        edited,
        logits,
        edited.stride(0),
        logits.stride(0),
        places,
        picked,
        grammars,
        grammar_bits,
        columns.repetition_penalty,
        columns.presence_penalty,
        columns.frequency_penalty,
        columns.history,
        columns.prompt_bits,
        columns.output_counts,
        columns.bias_first,
        columns.bias_len,
        columns.bias_ids,
        columns.bias_values,
        vocab,
        BLOCK=_BLOCK,
        ENTRIES=_ENTRIES,
        num_warps=4,
    )


def count_sampled(ids: Tensor, picked: Tensor, columns: EditColumns) -> None:
    """Adds newly sampled ids to their rows' counts. ids, picked: [picked] int32; -1 is no id. A row with penalties
    appears at most once."""
    (num_picked,) = ids.shape
    if num_picked == 0:
        return
    vocab = columns.output_counts.shape[1]
    grid = (triton.cdiv(num_picked, _ENTRIES),)
    _count_kernel[grid](
        ids, picked, columns.history, columns.output_counts, num_picked, vocab, ROWS=_ENTRIES, num_warps=4
    )


def _columns(vocab: int) -> EditColumns:
    numbers, integers = shaped(256, dtype=torch.float32), shaped(256, dtype=torch.int32)
    return EditColumns(
        repetition_penalty=numbers,
        presence_penalty=numbers,
        frequency_penalty=numbers,
        history=integers,
        prompt_bits=shaped(8, -(-vocab // 32), dtype=torch.int32),
        output_counts=shaped(8, vocab, dtype=torch.int16),
        bias_first=integers,
        bias_len=integers,
        bias_ids=integers,
        bias_values=numbers,
    )


def _launch_edit(rows: int) -> None:
    logits, picked = shaped(rows, _VOCAB, dtype=torch.float32), shaped(rows, dtype=torch.int32)
    bits = shaped(8, -(-_VOCAB // 32), dtype=torch.int32)
    edit_logits(logits, logits, picked, picked, _columns(_VOCAB), picked, bits)


def _launch_count(rows: int) -> None:
    picked = shaped(rows, dtype=torch.int32)
    count_sampled(picked, picked, _columns(_VOCAB))


_VOCAB = 151936  # Qwen3; every multiple of 16 gives the same kernels
VARIANTS = (
    Variant(name="edit_logits", launch=_launch_edit, plans={"_edit_kernel": WIDE}),
    Variant(name="count_sampled", launch=_launch_count, plans={"_count_kernel": Plan()}),
)
