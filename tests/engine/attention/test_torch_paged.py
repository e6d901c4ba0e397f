"""The attention backends against the definition in kernels.reference, over random steps."""

import random

import numpy as np
import pytest
import torch

from pagewire.engine.attention import torch_paged
from pagewire.engine.attention.base import AttentionStep
from pagewire.engine.attention.kv_cache import KvCache, KvShape
from pagewire.engine.attention.native import NativePagedAttention
from pagewire.engine.attention.torch_paged import TorchPagedAttention
from pagewire.kernels.cpu import build
from pagewire.kernels.cpu.library import Kernels
from pagewire.kernels.cpu.operations import native_ops
from pagewire.kernels.ops import reference_ops
from pagewire.kernels.reference import paged_attention

BLOCK_SIZE = 4
BACKENDS = ["torch"] if build.compiler() is None else ["torch", "native"]


def _backend(kind, cache):
    if kind == "torch":
        return TorchPagedAttention(cache=cache, ops=reference_ops(), dtype=cache.pages[0][0].dtype)
    kernels = Kernels(build.find().load())
    return NativePagedAttention(cache=cache, ops=native_ops(kernels), kernels=kernels)


def _step(rng, cache, *, contiguous):
    """A random step: decode rows in ascending order, then chunks; every row has blocks of its own."""
    size = cache.block_size
    contexts = sorted(rng.choice([1, 3, 4, 5, 30, 31, 90]) for _ in range(rng.randrange(6)))
    lens = [(context, 1) for context in contexts]
    for _ in range(rng.randrange(0 if lens else 1, 5)):
        context = rng.randrange(2, 120)
        lens.append((context, rng.choice([2, min(6, context), min(7, context), rng.randrange(2, context + 1)])))
    free = list(range(cache.num_blocks))
    if not contiguous:
        rng.shuffle(free)
    width = max(-(-context // size) for context, _ in lens) + 2
    table = np.full((len(lens), width), -1, np.int32)  # entries beyond a row's blocks are never read
    slots, fresh = [], []
    for row, (context, count) in enumerate(lens):
        num_blocks = -(-context // size)
        table[row, :num_blocks], free = free[:num_blocks], free[num_blocks:]
        slots += [int(table[row, p // size]) * size + p % size for p in range(context - count, context)]
        if context % size and context - context % size >= context - count:
            fresh.append(int(table[row, num_blocks - 1]))
    return AttentionStep(
        num_decode=len(contexts),
        context_lens=np.array([context for context, _ in lens]),
        query_lens=np.array([count for _, count in lens]),
        block_table=table,
        slots=torch.tensor(slots),
        fresh_blocks=torch.tensor(fresh) if fresh else None,
        order=np.arange(len(lens)),
    )


@pytest.mark.slow
@pytest.mark.parametrize("window", [None, 1, 6, 40])
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 2), (3, 3), (7, 1)])
@pytest.mark.parametrize(("kind", "size"), [(kind, size) for kind in BACKENDS for size in (4, 16)])
def test_random_steps_agree_with_the_definition(kind, size, window, softcap, heads, kv_heads, monkeypatch):
    dim = 16 if kind == "native" else 8
    monkeypatch.setattr(torch_paged, "_SLICE", 16)
    monkeypatch.setattr(torch_paged, "_GATHER_BYTES", 12 * size * kv_heads * dim * 4)
    rng = random.Random(f"{window} {softcap} {heads}")
    torch.manual_seed(1)
    shape = KvShape(num_layers=2, num_kv_heads=kv_heads, head_dim=dim, dtype=torch.float32)
    cache = KvCache(shape=shape, num_blocks=400, block_size=size, device=torch.device("cpu"))
    backend = _backend(kind, cache)
    for number in range(25):
        step = _step(rng, cache, contiguous=number % 2 == 0)
        written = np.concatenate(
            [row[: -(-c // size)] for row, c in zip(step.block_table, step.context_lens, strict=True)]
        )
        for keys, values in cache.pages:
            keys[: cache.num_blocks] = float("nan")
            values[: cache.num_blocks] = float("nan")
            keys[written], values[written] = torch.randn(2, len(written), size, kv_heads, dim)
        backend.begin(step)
        for layer, (k_pages, v_pages) in enumerate(cache.pages):
            query = torch.randn(int(step.query_lens.sum()), heads, dim)
            key, value = torch.randn(2, len(query), kv_heads, dim)
            out = backend.forward(layer, query, key, value, scale=0.3, window=window, softcap=softcap)
            torch.testing.assert_close(k_pages.view(-1, kv_heads, dim)[step.slots], key)
            expected = paged_attention(
                query,
                k_pages,
                v_pages,
                torch.from_numpy(np.maximum(step.block_table, 0)),
                torch.from_numpy(step.context_lens),
                torch.from_numpy(step.query_lens),
                0.3,
                window,
                softcap,
            )
            torch.testing.assert_close(out, expected, msg=lambda m, n=number: f"step {n}: {m}")


@pytest.mark.parametrize("kind", BACKENDS)
def test_bfloat16_pages_agree_with_the_definition(kind):
    dtype = torch.float32 if kind == "native" else torch.bfloat16  # of activations
    torch.manual_seed(2)
    shape = KvShape(num_layers=1, num_kv_heads=2, head_dim=16, dtype=torch.bfloat16)
    cache = KvCache(shape=shape, num_blocks=400, block_size=BLOCK_SIZE, device=torch.device("cpu"))
    backend = _backend(kind, cache)
    step = _step(random.Random(3), cache, contiguous=False)
    k_pages, v_pages = cache.pages[0]
    k_pages.normal_(), v_pages.normal_()
    cache.pages[0][0][cache.zero_block] = 0
    query = torch.randn(int(step.query_lens.sum()), 4, 16, dtype=dtype)
    key, value = torch.randn(2, len(query), 2, 16, dtype=dtype)
    backend.begin(step)
    out = backend.forward(0, query, key, value, scale=0.25)
    lens = torch.from_numpy(step.context_lens), torch.from_numpy(step.query_lens)
    table = torch.from_numpy(np.maximum(step.block_table, 0))
    expected = paged_attention(query, k_pages, v_pages, table, *lens, 0.25, None, None)
    torch.testing.assert_close(out, expected, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("seed", range(20))
def test_groups_of_like_lengths_cover_all_rows_within_the_padding_limits(seed):
    rng = random.Random(seed)
    lengths = sorted(rng.choice([1, 2, 3, 50, 70, 500]) for _ in range(rng.randrange(60)))
    groups = torch_paged._like_lengths(lengths, 100)
    assert sorted(row for first, last in groups for row in range(first, last)) == list(range(len(lengths)))
    for first, last in groups:
        padded = max(lengths[first:last]) * (last - first)
        assert last - first == 1 or padded <= 100
        assert padded <= max(2 * sum(lengths[first:last]), 64)
