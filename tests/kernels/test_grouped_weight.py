import dataclasses

import pytest
import torch

from pagewire.kernels.grouped_weight import GroupedWeight, concatenate


def weight(n: int, k: int, groups: int, *, seed: int = 0, table: tuple[int, ...] | None = None) -> GroupedWeight:
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.randint(0, 16, (n, k), generator=generator, dtype=torch.uint8)
    scales = torch.rand((groups, n), generator=generator)
    return GroupedWeight(numbers, scales, 8 * scales, bits=4, table=table)


def test_dequantize_scales_each_group_of_columns() -> None:
    some = weight(3, 8, 2)
    dense = some.dequantize(torch.float32)
    for row in range(3):
        for column in range(8):
            scale = some.scales[column // 4, row].item()
            expected = (some.numbers[row, column].item() - 8) * scale
            assert dense[row, column].item() == pytest.approx(expected, abs=1e-5)


def test_dequantize_looks_numbers_up_in_the_table() -> None:
    plain = weight(4, 16, 1)
    doubled = dataclasses.replace(plain, table=tuple(2 * i for i in range(16)), offsets=2 * plain.offsets)
    torch.testing.assert_close(doubled.dequantize(torch.float32), 2 * plain.dequantize(torch.float32))


def test_dequantize_restores_the_order_of_the_activations() -> None:
    plain = weight(4, 16, 2)
    order = torch.randperm(16, generator=torch.Generator().manual_seed(1)).int()
    dense = dataclasses.replace(plain, order=order).dequantize(torch.float32)
    assert torch.equal(dense[:, order.long()], plain.dequantize(torch.float32))


def test_concatenate_stacks_rows_of_equal_groups_only() -> None:
    a, b = weight(3, 16, 2), weight(5, 16, 2, seed=1)
    whole = concatenate([a, b]).dequantize(torch.float32)
    assert torch.equal(whole, torch.cat([a.dequantize(torch.float32), b.dequantize(torch.float32)]))
    with pytest.raises(ValueError, match="groups"):
        concatenate([a, weight(5, 16, 4)])
    with pytest.raises(ValueError, match="ordered"):
        concatenate([a, dataclasses.replace(b, order=torch.arange(16).flip(0).int())])
