import pytest
import torch

from pagewire.kernels.triton.norm_rotary_write import rotary_table
from pagewire.kernels.triton.rotate import rotate

MAX_LEN = 300


@pytest.mark.parametrize(
    ("heads", "dim", "first", "turning"), [(4, 16, 0, 16), (3, 24, 8, 16), (20, 12, 4, 6), (1, 80, 0, 80), (1, 6, 0, 2)]
)
def test_the_given_features_of_each_head_turn_in_place(device, heads, dim, first, turning):
    whole = torch.randn(5, heads * dim + 9, device=device)
    x, rest = whole[:, 3 : 3 + heads * dim], whole[:, 3 + heads * dim :].clone()
    positions = torch.tensor([0, 1, 7, 299, 130], dtype=torch.int32, device=device)
    table = rotary_table(1 / 10000 ** (torch.arange(0, turning, 2, device=device) / turning), 1.3, MAX_LEN)
    states = x.unflatten(1, (heads, dim)).double()
    low, high = states[..., first : first + turning].chunk(2, dim=-1)
    cos, sin = table[positions.long()].double()[:, None].chunk(2, dim=-1)
    turned = torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1)
    expected = torch.cat((states[..., :first], turned, states[..., first + turning :]), dim=-1).flatten(1)
    rotate(x, table, positions, heads=heads, first=first)
    torch.testing.assert_close(x.double(), expected, atol=1e-5, rtol=1e-5)
    assert torch.equal(whole[:, 3 + heads * dim :], rest)


def test_narrow_numbers_are_rounded_once(device):
    x = torch.randn(4, 64, device=device).bfloat16()
    table = rotary_table(torch.rand(32, device=device), 1.0, MAX_LEN)
    positions = torch.arange(4, dtype=torch.int32, device=device)
    low, high = x.float().chunk(2, dim=1)
    cos, sin = table[positions.long()].chunk(2, dim=1)
    expected = torch.cat((low * cos - high * sin, high * cos + low * sin), dim=1).bfloat16()
    rotate(x, table, positions, heads=1)
    assert (x == expected).float().mean() > 0.98
