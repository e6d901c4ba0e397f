"""The attention backends against the definition in kernels.reference, over random steps."""

import random

import numpy as np
import pytest
import torch
from torch import Tensor

from pagewire.engine.attention import torch_paged
from pagewire.engine.attention.base import Alibi, AttentionBackend, AttentionParameters, AttentionStep
from pagewire.engine.attention.cache_groups import FULL, Lifetime
from pagewire.engine.attention.kv_cache import KvCache, KvShape, StateTile, Tile
from pagewire.engine.attention.native import NativePagedAttention
from pagewire.engine.attention.torch_paged import TorchPagedAttention
from pagewire.kernels.cpu import build
from pagewire.kernels.cpu.library import Kernels
from pagewire.kernels.cpu.operations import native_ops
from pagewire.kernels.ops import reference_ops
from pagewire.kernels.reference import paged_attention

BLOCK_SIZE = 4
BACKENDS = ["torch"] if build.compiler() is None else ["torch", "native"]


def _backend(kind: str, cache: KvCache) -> AttentionBackend:
    if kind == "torch":
        return TorchPagedAttention(cache=cache, ops=reference_ops(), dtype=cache.shape.dtype)
    kernels = Kernels(build.find().load())
    return NativePagedAttention(cache=cache, ops=native_ops(kernels), kernels=kernels)


def _step(rng: random.Random, cache: KvCache) -> AttentionStep:
    """A random step: decode rows in ascending order, then chunks; every row has pages of its own. The blocks that a
    group no longer needs are released. Pages without a row are NaN."""
    size = cache.block_size
    contexts = sorted(rng.choice([1, 3, 4, 5, 30, 31, 90]) for _ in range(rng.randrange(6)))
    lens = [(context, 1) for context in contexts]
    for _ in range(rng.randrange(0 if lens else 1, 5)):
        context = rng.randrange(2, 120)
        lens.append((context, rng.choice([2, min(6, context), min(7, context), rng.randrange(2, context + 1)])))
    free = list(range(cache.num_pages))
    rng.shuffle(free)
    width = max(-(-context // size) for context, _ in lens) + 2
    tables = np.full((cache.groups.num_tables, len(lens), width), -1, np.int32)
    slots: list[list[int]] = [[] for _ in tables]
    for keys, values in cache.pages:
        keys[: cache.num_pages], values[: cache.num_pages] = float("nan"), float("nan")
    for number, group in enumerate(cache.groups.groups):
        for table in cache.groups.tables(number):
            for row, (context, count) in enumerate(lens if group.lifetime.kind != "state" else []):
                first, last = group.lifetime.needed_from(context - count) // size, -(-context // size)
                pages = [free.pop() for _ in range(last - first)]
                tables[table, row, first:last] = pages
                slots[table] += [
                    int(tables[table, row, p // size]) * size + p % size for p in range(context - count, context)
                ]
                for own, pair in zip(cache.tables, cache.pages, strict=True):
                    for part in pair if own == table else ():
                        part[pages] = torch.randn(len(pages), *part.shape[1:]).to(part.dtype)
    most = max(map(len, slots))
    return AttentionStep(
        num_decode=len(contexts),
        context_lens=np.array([context for context, _ in lens]),
        query_lens=np.array([count for _, count in lens]),
        tables=tables,
        slots=torch.tensor([own or [0] * most for own in slots]),
        order=np.arange(len(lens)),
    )


def _written(pages: Tensor, slots: Tensor) -> Tensor:
    return pages[slots // pages.shape[1], slots % pages.shape[1]]


def _expected(step: AttentionStep, cache: KvCache, tile: int, query: Tensor, parameters: AttentionParameters) -> Tensor:
    k_pages, v_pages = cache.pages[tile]
    alibi = parameters.alibi
    return paged_attention(
        query,
        k_pages,
        k_pages[..., : parameters.latent] if parameters.latent else v_pages,
        torch.from_numpy(np.maximum(step.tables[cache.tables[tile]], 0)),
        torch.from_numpy(step.context_lens),
        torch.from_numpy(step.query_lens),
        parameters.scale,
        parameters.window,
        parameters.softcap,
        chunk=parameters.chunk,
        sinks=parameters.sinks,
        slopes=None if alibi is None else alibi.slopes,
        before_scale=alibi is not None and alibi.before_scale,
        rounded=alibi is not None and alibi.rounded,
    )


def _check(backend: AttentionBackend, cache: KvCache, layers: list[tuple[int, int, AttentionParameters]], steps: int):
    """layers: the tile, query heads and parameters of each; the second layer of a tile reads what the first wrote."""
    rng = random.Random(7)
    for number in range(steps):
        step = _step(rng, cache)
        backend.begin(step)
        has_written = set()
        for tile, heads, parameters in layers:
            shape = cache.shape.layers[tile]
            query = torch.randn(int(step.query_lens.sum()), heads, shape.head_dim)
            key, value = None, None
            if tile not in has_written:
                has_written.add(tile)
                key = torch.randn(len(query), shape.kv_heads, shape.head_dim)
                value = None if parameters.latent else torch.randn(len(query), shape.kv_heads, shape.value_dim)
            out = backend.forward(tile, query, key, value, parameters)
            slots = step.slots[cache.tables[tile]]
            if key is not None:
                torch.testing.assert_close(_written(cache.pages[tile][0], slots), key)
            if value is not None:
                torch.testing.assert_close(_written(cache.pages[tile][1], slots), value)
            expected = _expected(step, cache, tile, query, parameters)
            torch.testing.assert_close(out, expected, msg=lambda m, n=number, t=tile: f"step {n}, tile {t}: {m}")


@pytest.mark.slow
@pytest.mark.parametrize("window", [None, 1, 6, 40])
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 2), (3, 3), (7, 1)])
@pytest.mark.parametrize(("kind", "size"), [(kind, size) for kind in BACKENDS for size in (4, 16)])
def test_random_steps_agree_with_the_definition(kind, size, window, softcap, heads, kv_heads, monkeypatch):
    dim = 16 if kind == "native" else 8
    monkeypatch.setattr(torch_paged, "_SLICE", 16)
    monkeypatch.setattr(torch_paged, "_GATHER_BYTES", 12 * size * kv_heads * dim * 4)
    torch.manual_seed(1)
    shape = KvShape.uniform(num_layers=2, kv_heads=kv_heads, head_dim=dim, dtype=torch.float32)
    cache = KvCache(shape=shape, num_pages=400, block_size=size, device=torch.device("cpu"))
    parameters = AttentionParameters(scale=0.3, window=window, softcap=softcap)
    _check(_backend(kind, cache), cache, [(0, heads, parameters), (1, heads, parameters)], steps=25)


SLOPES = torch.tensor([0.5, 0.25, 0.125, 0.0625])
KINDS = {
    "chunk 7": {"chunk": 7},
    "chunk 32": {"chunk": 32},
    "sinks": {"sinks": torch.tensor([-1.0, 0.0, 2.0, 5.0])},
    "sinks window": {"sinks": torch.tensor([-1.0, 0.0, 2.0, 5.0]), "window": 6},
    "sinks chunk": {"sinks": torch.tensor([-1.0, 0.0, 2.0, 5.0]), "chunk": 16, "softcap": 3.0},
    "alibi": {"alibi": Alibi(SLOPES)},
    "alibi before scale": {"alibi": Alibi(SLOPES, before_scale=True)},
    "alibi rounded": {"alibi": Alibi(SLOPES / 3, before_scale=True, rounded=True)},
    "alibi window": {"alibi": Alibi(SLOPES), "window": 9},
    "alibi chunk": {"alibi": Alibi(SLOPES), "chunk": 9},
}


@pytest.mark.parametrize("kind", BACKENDS)
@pytest.mark.parametrize("name", KINDS)
def test_every_kind_of_attention_agrees_with_the_definition(kind, name, monkeypatch):
    """Those that the C kernels lack are computed by plain torch."""
    monkeypatch.setattr(torch_paged, "_SLICE", 16)
    torch.manual_seed(1)
    shape = KvShape.uniform(num_layers=1, kv_heads=2, head_dim=16, dtype=torch.float32)
    cache = KvCache(shape=shape, num_pages=400, block_size=BLOCK_SIZE, device=torch.device("cpu"))
    _check(_backend(kind, cache), cache, [(0, 4, AttentionParameters(scale=0.3, **KINDS[name]))], steps=8)


@pytest.mark.parametrize("kind", BACKENDS)
def test_layers_of_different_sizes_and_lifetimes_share_pages(kind):
    """Values may be narrower than keys, or a part of them; layers may read another one's tile."""
    torch.manual_seed(1)
    layers = (
        Tile(2, 32, 32),
        Tile(2, 16, 16, Lifetime("window", 6)),
        Tile(1, 24, 8),
        Tile(2, 16, 16, Lifetime("chunk", 9)),
        Tile(2, 16, 16, Lifetime("window", 6)),
        Tile(1, 48, 0),
        Tile(4, 16, 16, Lifetime("window", 6)),
    )
    states = (StateTile((3, 8, 8)), StateTile((5, 7), torch.bfloat16))
    shape = KvShape(layers=layers, dtype=torch.float32, states=states)
    cache = KvCache(shape=shape, num_pages=3000, block_size=BLOCK_SIZE, device=torch.device("cpu"))
    assert [group.lifetime for group in cache.groups.groups] == [
        FULL, Lifetime("window", 6), Lifetime("chunk", 9), Lifetime("state")
    ]  # fmt: skip
    assert cache.groups.num_tables > len(cache.groups.groups), "some group has several pages a block"
    full, window = AttentionParameters(scale=0.3), AttentionParameters(scale=0.3, window=6)
    latent = AttentionParameters(scale=0.2, latent=24)
    chunk = AttentionParameters(scale=0.3, chunk=9)
    order = [
        (0, full),
        (1, window),
        (2, full),
        (3, chunk),
        (4, window),
        (5, latent),
        (6, window),
        (0, full),
        (4, window),
    ]
    _check(_backend(kind, cache), cache, [(tile, 4, parameters) for tile, parameters in order], steps=8)


@pytest.mark.skipif("native" not in BACKENDS, reason="no C compiler")
def test_the_c_kernels_say_what_they_lack():
    shape = KvShape(layers=(Tile(2, 32, 16), Tile(2, 24, 24), Tile(1, 32, 8)), dtype=torch.float32)
    cache = KvCache(shape=shape, num_pages=2, block_size=BLOCK_SIZE, device=torch.device("cpu"))
    backend = _backend("native", cache)
    assert isinstance(backend, NativePagedAttention)
    assert all(backend.lacks(0, AttentionParameters(scale=1.0, **kind)) is None for kind in KINDS.values())
    lacking = {
        backend.lacks(1, AttentionParameters(scale=1.0)): "a head size that is no multiple of 16 (24)",
        backend.lacks(2, AttentionParameters(scale=1.0)): "a head size that is no multiple of 16 (8)",
    }
    assert all(said == wanted for said, wanted in lacking.items())


@pytest.mark.parametrize("kind", BACKENDS)
def test_bfloat16_pages_agree_with_the_definition(kind):
    dtype = torch.float32 if kind == "native" else torch.bfloat16  # of activations
    torch.manual_seed(2)
    shape = KvShape.uniform(num_layers=1, kv_heads=2, head_dim=16, dtype=torch.bfloat16)
    cache = KvCache(shape=shape, num_pages=400, block_size=BLOCK_SIZE, device=torch.device("cpu"))
    backend = _backend(kind, cache)
    step = _step(random.Random(3), cache)
    query = torch.randn(int(step.query_lens.sum()), 4, 16, dtype=dtype)
    key, value = torch.randn(2, len(query), 2, 16, dtype=dtype)
    backend.begin(step)
    parameters = AttentionParameters(scale=0.25)
    out = backend.forward(0, query, key, value, parameters)
    torch.testing.assert_close(out, _expected(step, cache, 0, query, parameters), atol=2e-2, rtol=2e-2)
