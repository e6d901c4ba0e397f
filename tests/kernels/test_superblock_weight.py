"""Weights in superblocks in plain torch: the `gguf` package's numbers, and what a group's scale and offset are."""

import gguf
import gguf_files
import numpy as np
import pytest
import torch

from pagewire.kernels.superblock_weight import FORMS, SuperblockWeight, concatenate, packed_bytes


def make(kind: str, n: int, k: int, seed: int = 0) -> SuperblockWeight:
    return SuperblockWeight(kind, torch.from_numpy(gguf_files.random_blocks(kind, (n, k), seed)))


@pytest.mark.parametrize("kind", FORMS)
def test_the_weight_is_that_of_the_gguf_package(kind: str) -> None:
    weight = make(kind, 12, 768)
    expected = torch.from_numpy(gguf.dequantize(weight.blocks.numpy(), gguf.GGMLQuantizationType[kind]))
    assert weight.shape == (12, 768) and torch.equal(weight.dequantize(torch.float32), expected.view(12, 768))
    grouped = weight.grouped()
    assert grouped.group_size == weight.group_size == 256 // weight.form.groups
    assert torch.equal(grouped.dequantize(torch.bfloat16), expected.view(12, 768).bfloat16())


@pytest.mark.parametrize("kind", FORMS)
def test_values_are_within_what_the_kernels_multiply(kind: str) -> None:
    """Numbers below 2 ** bits, and scales and minima for which 32 bits hold the sums of a superblock."""
    values, form = make(kind, 64, 1024).values(), FORMS[kind]
    assert int(values.numbers.max()) == 2**form.bits - 1 and int(values.numbers.min()) == 0
    largest = max(form.zero, 2**form.bits - 1 - form.zero) * 127 * 256 * int(values.scales.abs().max())
    assert largest < 2**31
    assert (values.minima is None) == bool(form.zero)
    assert values.minima is None or 0 <= int(values.minima.min()) <= int(values.minima.max()) < 64


def test_rows_and_stacks() -> None:
    parts = [make("Q6_K", n, 512, n) for n in (8, 4)]
    whole = concatenate(parts)
    expected = torch.cat([part.dequantize(torch.float32) for part in parts])
    assert torch.equal(whole.dequantize(torch.float32), expected)
    index = torch.tensor([11, 0, 5])
    assert torch.equal(whole.rows(index).dequantize(torch.float32), expected[index])
    assert whole.nbytes == 12 * 2 * 210 and packed_bytes("Q6_K", 12, 512) == 16 * 2 * 212
    with pytest.raises(ValueError, match="Q6_K, Q4_K"):
        concatenate([parts[0], make("Q4_K", 4, 512)])


def test_factors_that_are_not_finite() -> None:
    weight = make("Q4_K", 4, 512)
    assert weight.is_finite()
    blocks = weight.blocks.clone()
    blocks[2, 144 + 2 : 144 + 4] = torch.from_numpy(np.array([np.inf], np.float16).view(np.uint8))
    assert not SuperblockWeight("Q4_K", blocks).is_finite()
