"""Dequantized weights against explicit formulas and transformers."""

from dataclasses import replace

import pytest
import torch
from transformers.integrations.finegrained_fp8 import Fp8Dequantize

from pagewire.kernels.grouped_weight import GroupedWeight
from pagewire.kernels.quantized_weight import (
    E2M1,
    Fp4Weight,
    Fp8Weight,
    Int4Weight,
    Int8Weight,
    concatenate,
    for_triton,
    int4_weight,
)


def _fp8(n, k, block=None):
    values = torch.randn(n, k).to(torch.float8_e4m3fn)
    if block is None:
        return Fp8Weight(values, torch.rand(n))
    return Fp8Weight(values, torch.rand(-(-n // block[0]), -(-k // block[1])), block)


def _int4(n, k, group, order=None):
    groups = k // group
    numbers = torch.randint(0, 16, (n, k), dtype=torch.uint8)
    zeros = torch.randint(0, 17, (groups, n), dtype=torch.uint8)
    return int4_weight(numbers, torch.rand(groups, n).half(), zeros, order), numbers, zeros


def _grouped(n, k, group, order=None):
    scales = torch.rand(k // group, n).half().float()
    zeros = torch.randint(0, 17, scales.shape)
    return GroupedWeight(torch.randint(0, 16, (n, k), dtype=torch.uint8), scales, scales * zeros, 4, order=order)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fp8_blocks_equal_those_of_transformers(dtype):
    weight = _fp8(96, 64, (32, 16))
    expected = Fp8Dequantize(None)._dequantize_one(weight.values, weight.scale, dtype)
    assert torch.equal(weight.dequantize(dtype), expected)


def test_fp8_equals_the_formula():
    ragged, rows = _fp8(40, 50, (32, 32)), _fp8(5, 7)
    for i in range(40):
        for j in range(50):
            expected = ragged.values[i, j].float() * ragged.scale[i // 32, j // 32]
            assert ragged.dequantize(torch.float32)[i, j] == expected
    assert torch.equal(rows.dequantize(torch.float32), rows.values.float() * rows.scale[:, None])


@pytest.mark.parametrize(("k", "group", "half"), [(256, 128, 64), (192, 64, 32), (96, 32, 16), (256, 256, 64)])
def test_int4_equals_the_formula(k, group, half):
    weight, numbers, zeros = _int4(24, k, group)
    assert weight.half == half and weight.shape == (24, k) and weight.group_size == group
    out = weight.dequantize(torch.float32)
    for i in range(24):
        for j in range(k):
            scale = weight.scales[j // group, i].float()
            assert out[i, j] == (int(numbers[i, j]) - int(zeros[j // group, i])) * scale
    byte = int(weight.packed[3, half + 1])  # of the second tile
    assert (byte & 15, byte >> 4) == (int(numbers[3, 2 * half + 1]), int(numbers[3, 3 * half + 1]))


def test_int4_columns_follow_the_order_of_the_weight():
    order = torch.randperm(64).int()
    weight, _, _ = _int4(8, 64, 32, order)
    straight = Int4Weight(weight.packed, weight.scales, weight.zeros, weight.half)
    out = weight.dequantize(torch.float32)
    assert torch.equal(out[:, order.long()], straight.dequantize(torch.float32)) and out.shape == (8, 64)


def test_a_group_size_that_cannot_be_packed_is_refused():
    with pytest.raises(ValueError, match="48 columns in groups of 24"):
        _int4(8, 48, 24)


@pytest.mark.parametrize("weight", [_fp8(96, 40), _fp8(96, 40, (16, 32)), _int4(96, 64, 32)[0]])
def test_interleaving_alternates_gates_and_ups(weight):
    before, after = (w.dequantize(torch.float32) for w in (weight, weight.interleave()))
    assert torch.equal(after[0::2], before[:48]) and torch.equal(after[1::2], before[48:])
    assert weight.interleave().nbytes == weight.nbytes


@pytest.mark.parametrize(
    "parts",
    [
        [_fp8(n, 40) for n in (8, 3, 5)],
        [_fp8(n, 40, (16, 32)) for n in (32, 16, 7)],
        [_grouped(n, 64, 32) for n in (8, 16)],
        [_grouped(8, 64, 32)],
    ],
)
def test_concatenation_keeps_all_weights(parts):
    whole = concatenate(parts).dequantize(torch.float32)
    assert torch.equal(whole, torch.cat([part.dequantize(torch.float32) for part in parts]))


@pytest.mark.parametrize(
    ("parts", "why"),
    [
        ([_fp8(20, 40, (16, 32)), _fp8(16, 40, (16, 32))], "no multiples of 16"),
        ([_fp8(16, 40, (16, 32)), _fp8(16, 40)], "blocks differ"),
        ([_fp8(16, 64), _grouped(8, 64, 32)], "quantized in different ways"),
        ([_grouped(8, 64, 64), _grouped(8, 64, 32)], "groups, tables or numbers of bits differ"),
        ([_grouped(8, 64, 32), _grouped(8, 64, 32, torch.arange(64).flip(0).int())], "ordered differently"),
    ],
)
def test_weights_of_different_formats_cannot_be_concatenated(parts, why):
    with pytest.raises(ValueError, match=why):
        concatenate(parts)


@pytest.mark.parametrize("order", [None, torch.arange(64).flip(0).int()])
def test_the_layout_of_triton_holds_the_same_weight(order):
    weight = _grouped(24, 64, 32, order)
    int4 = for_triton(weight)
    assert int4.scales.dtype == torch.float16 and int4.nbytes < weight.nbytes
    assert torch.equal(int4.dequantize(torch.float32), weight.dequantize(torch.float32))


def test_weights_that_the_layout_of_triton_cannot_hold():
    weight = _grouped(24, 64, 32)
    for other in (replace(weight, bits=8), replace(weight, offsets=weight.offsets + 0.3 * weight.scales)):
        with pytest.raises(ValueError, match="no integers of 4 bits"):
            for_triton(other)


def _signed(n, k, group):
    scales = torch.rand(k // group, n)
    return GroupedWeight(torch.randint(0, 256, (n, k), dtype=torch.uint8), scales, 128 * scales, 8)


def _nvfp4(n, k):
    """A weight as `engine/weights` makes it: the scales of the file times a factor, in float32."""
    narrow = (torch.rand(k // 16, n) * 400).to(torch.float8_e4m3fn)
    factor = torch.rand(n) / 1000
    scales = narrow.float() * factor / 2
    table = tuple(int(2 * number + 12) for number in E2M1)
    numbers = torch.randint(0, 16, (n, k), dtype=torch.uint8)
    return GroupedWeight(numbers, scales, 12 * scales, 4, table, factor=factor), narrow


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("group", [16, 64])
def test_integers_of_8_bits_are_the_same_for_triton(group, dtype):
    weight = _signed(12, 64, group)
    kept = for_triton(weight)
    assert isinstance(kept, Int8Weight) and torch.equal(kept.dequantize(dtype), weight.dequantize(dtype))
    assert kept.interleave().dequantize(dtype)[1].equal(weight.dequantize(dtype)[6])
    order = torch.randperm(64).int()
    ordered = for_triton(replace(weight, order=order))
    assert torch.equal(ordered.dequantize(dtype), replace(weight, order=order).dequantize(dtype))
    with pytest.raises(ValueError, match="no signed ones of 8 bits"):
        for_triton(replace(weight, offsets=127 * weight.scales))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nvfp4_is_the_same_for_triton_and_has_the_scales_of_the_file(dtype):
    weight, narrow = _nvfp4(12, 96)
    kept = for_triton(concatenate([weight.rows(torch.arange(5)), weight.rows(torch.arange(5, 12))]))
    assert isinstance(kept, Fp4Weight) and torch.equal(kept.scales.view(torch.uint8), narrow.view(torch.uint8))
    assert torch.equal(kept.dequantize(dtype), weight.dequantize(dtype))
    assert kept.nbytes < 12 * 96 * 0.65
    assert kept.interleave().dequantize(dtype)[1].equal(weight.dequantize(dtype)[6])


def test_mxfp4_is_the_same_for_triton():
    weight, _ = _nvfp4(12, 96)
    scales = torch.ldexp(torch.ones(3, 12), torch.randint(-60, 60, (3, 12)))
    weight = replace(weight, scales=scales, offsets=12 * scales, factor=None)
    kept = for_triton(weight)
    assert isinstance(kept, Fp4Weight) and kept.factor is None and kept.scales.dtype == torch.bfloat16
    assert torch.equal(kept.dequantize(torch.float32), weight.dequantize(torch.float32))
