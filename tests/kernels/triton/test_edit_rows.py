"""Biases and histories that replace others."""

import numpy as np
import torch

from pagewire.kernels.triton.edit_logits import EditColumns
from pagewire.kernels.triton.edit_rows import Edit, edit_rows, fill_edits

VOCAB, ROWS, BIASES = 3000, 4, 2500


def _columns(device):
    def stale(dtype, *shape):
        return torch.full(shape, 55, dtype=dtype, device=device)

    numbers, integers = stale(torch.float32, ROWS), stale(torch.int32, ROWS)
    return EditColumns(
        repetition_penalty=numbers,
        presence_penalty=numbers,
        frequency_penalty=numbers,
        history=integers,
        prompt_bits=stale(torch.int32, ROWS, -(-VOCAB // 32)),
        output_counts=stale(torch.int16, ROWS, VOCAB),
        bias_first=torch.arange(ROWS, dtype=torch.int32, device=device) * BIASES,
        bias_len=stale(torch.int32, ROWS),
        bias_ids=stale(torch.int32, ROWS * BIASES),
        bias_values=stale(torch.float32, ROWS * BIASES),
    )


def test_edits_replace_what_there_was_and_nothing_else(device):
    random = np.random.default_rng(1)
    columns = _columns(device)
    ids = random.permutation(10000)[:2100].astype(np.int32)
    values = random.standard_normal(2100).astype(np.float32)
    words = random.permutation(-(-VOCAB // 32))[:60].astype(np.int32)
    bits = random.integers(-(2**31), 2**31, 60).astype(np.int32)
    tokens = random.permutation(VOCAB)[:1500].astype(np.int32)
    counts = random.integers(1, 2**15, 1500).astype(np.int32)
    edits = [
        Edit("bias", 2, ids, values.view(np.int32)),
        Edit("prompt", 1, words, bits),
        Edit("bias", 0, ids[:0], ids[:0]),
        Edit("output", 1, tokens, counts),
        Edit("output", 3, tokens[:0], counts[:0]),
    ]
    edit_rows(torch.from_numpy(fill_edits(edits)).to(device), len(edits), columns)

    assert columns.bias_len.tolist() == [0, 55, 2100, 55]
    own = slice(2 * BIASES, 2 * BIASES + 2100)
    assert columns.bias_ids[own].tolist() == ids.tolist() and columns.bias_values[own].tolist() == values.tolist()
    assert (columns.bias_ids == 55).sum() >= ROWS * BIASES - 2101 and columns.bias_ids[own.stop] == 55
    expected = torch.zeros(columns.prompt_bits.shape[1], dtype=torch.int32)
    expected[torch.from_numpy(words).long()] = torch.from_numpy(bits)
    assert columns.prompt_bits[1].tolist() == expected.tolist()
    expected = torch.zeros(VOCAB, dtype=torch.int32)
    expected[torch.from_numpy(tokens).long()] = torch.from_numpy(counts)
    assert columns.output_counts[1].tolist() == expected.tolist()
    assert not columns.output_counts[3].any()
    for column, rows in ((columns.prompt_bits, (0, 2, 3)), (columns.output_counts, (0, 2))):
        assert all((column[row] == 55).all() for row in rows)
