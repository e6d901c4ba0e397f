"""The reference kernels against formulas written out."""

import pytest
import torch

from pagewire.kernels import reference


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rms_norm(dtype):
    x, weight = torch.randn(5, 24, dtype=dtype) * 100, torch.randn(24, dtype=dtype)
    expected = x.float() / (x.float().square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.float()
    torch.testing.assert_close(reference.rms_norm(x, weight, 1e-5), expected.to(dtype))


def test_silu_mul():
    x = torch.randn(4, 10)
    torch.testing.assert_close(reference.silu_mul(x), x[:, :5] * torch.sigmoid(x[:, :5]) * x[:, 5:])


def test_rotary_rotates_pairs():
    x, angles = torch.randn(3, 2, 8), torch.randn(3, 1, 4)
    cos, sin = angles.cos(), angles.sin()
    table = torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)
    a, b = x[..., :4], x[..., 4:]
    expected = torch.cat((a * cos - b * sin, b * cos + a * sin), -1)
    torch.testing.assert_close(reference.norm_rotary(x, 1, None, None, 0.0, *table), expected)


def test_heads_are_normed_before_they_are_rotated():
    x, angles, q_norm, k_norm = torch.randn(3, 5, 8), torch.randn(3, 1, 4), torch.randn(8), torch.randn(8)
    table = angles.cos().repeat(1, 1, 2), torch.cat((-angles.sin(), angles.sin()), -1)
    normed = torch.cat((reference.rms_norm(x[:, :3], q_norm, 1e-6), reference.rms_norm(x[:, 3:], k_norm, 1e-6)), 1)
    expected = reference.norm_rotary(normed, 3, None, None, 0.0, *table)
    torch.testing.assert_close(reference.norm_rotary(x, 3, q_norm, k_norm, 1e-6, *table), expected)


def test_write_kv_writes_only_the_given_slots():
    k_pages, v_pages = torch.zeros(3, 2, 4, 2, 6).unbind(1)  # keys and values share pages
    key, value = torch.randn(2, 5, 6).transpose(0, 1)[:3], torch.randn(3, 2, 6)  # keys need not be contiguous
    reference.write_kv(key, value, k_pages, v_pages, torch.tensor([11, 0, 6]))
    assert torch.equal(k_pages.flatten(0, 1)[[11, 0, 6]], key)
    assert torch.equal(v_pages.flatten(0, 1)[[11, 0, 6]], value)
    assert int(k_pages.flatten(0, 1).flatten(1).any(-1).sum()) == 3


def test_attend_applies_the_softcap_to_scores():
    query, key, value = torch.randn(3, 1, 2, 4, 8).unbind(0)
    mask = torch.zeros(4, 4).masked_fill(torch.ones(4, 4).triu(1).bool(), float("-inf"))
    scores = torch.tanh(query @ key.transpose(-1, -2) * 0.5 / 3) * 3 + mask
    torch.testing.assert_close(reference.attend(query, key, value, mask, 0.5, 3.0), scores.softmax(-1) @ value)
    plain = (query @ key.transpose(-1, -2) * 0.5 + mask).softmax(-1) @ value
    torch.testing.assert_close(reference.attend(query, key, value, mask, 0.5, None), plain)


@pytest.mark.parametrize("is_two_sided", [False, True])
@pytest.mark.parametrize(("buckets", "longest"), [(32, 128), (12, 40)])
def test_relative_positions_are_those_of_t5(buckets, longest, is_two_sided):
    from transformers.models.t5.modeling_t5 import T5Attention

    table = torch.randn(buckets, 3)
    bias = reference.RelativeBias(table, longest, is_two_sided)
    queries, keys = torch.arange(300)[:, None], torch.arange(300)
    theirs = T5Attention._relative_position_bucket(keys - queries, is_two_sided, buckets, longest)
    assert len(theirs.unique()) == buckets - is_two_sided  # no key at distance 0 is behind the query
    assert torch.equal(reference.relative_bias(bias, keys, queries), table[theirs].permute(2, 0, 1))
