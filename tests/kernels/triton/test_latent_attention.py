"""Latent attention (MLA) against its definition in float64, which expands the latents to keys and values of every head.

Every position that no row may read is NaN.
"""

import math
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor

from pagewire.kernels import reference_latent
from pagewire.kernels.triton.decode_attention import decode_attention, plan_decode, workspace_decode
from pagewire.kernels.triton.extend_attention import extend_attention, extend_work, tile_tokens
from pagewire.kernels.triton.latent_attention import LatentLayer, attend_latent, supports_latent, write_latent

BIG = torch.cuda.is_available()
FP8 = torch.float8_e4m3fn
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2, FP8: 1e-2}


@dataclass(frozen=True, kw_only=True)
class Sizes:
    heads: int
    nope_dim: int = 8
    rope_dim: int = 16
    value_dim: int = 10
    rank: int = 32
    block_size: int = 16

    @property
    def width(self) -> int:
        return reference_latent.cache_width(self.rank, self.rope_dim)


TINY = Sizes(heads=3)
MANY = Sizes(heads=20, block_size=64)  # two tiles of heads
DEEPSEEK = Sizes(heads=2, nope_dim=128, rope_dim=64, value_dim=128, rank=512, block_size=64)


class Cache:
    """The latents of some rows, and pages in random order that hold them. The last page is no row's."""

    def __init__(self, sizes: Sizes, contexts: list[int], dtype: torch.dtype, device: str) -> None:
        self.sizes, self.contexts = sizes, contexts
        blocks = [-(-context // sizes.block_size) for context in contexts]
        unused = sum(blocks)
        size = sizes.block_size * sizes.width
        between = 5 * size  # pages are not adjacent
        stored = FP8 if dtype == FP8 else dtype
        memory = torch.full((unused + 1, between), torch.nan, device=device).to(stored)
        self.pages = memory[:, :size].view(unused + 1, 1, sizes.block_size, sizes.width)
        self.table = torch.full((len(contexts), max(blocks) + 1), unused, dtype=torch.int32)
        for row, own in enumerate(torch.randperm(unused, dtype=torch.int32).split(blocks)):
            self.table[row, : len(own)] = own
        working = torch.bfloat16 if dtype == FP8 else dtype
        self.latents = [torch.randn(n, sizes.rank, device=device).to(working) for n in contexts]
        self.keys = [torch.randn(n, sizes.rope_dim, device=device).to(working) for n in contexts]
        self.table = self.table.to(device)

    def slots(self, row: int, first: int, end: int) -> Tensor:
        at = torch.arange(first, end, device=self.table.device)
        size = self.sizes.block_size
        return (self.table[row, at // size].long() * size + at % size).int()

    def write(self, row: int, first: int, end: int) -> None:
        write_latent(self.latents[row][first:end], self.keys[row][first:end], self.pages, self.slots(row, first, end))

    def new(self, counts: list[int]) -> tuple[Tensor, Tensor, Tensor]:
        """(latents, keys, slots) of the last `counts` positions of the rows."""
        spans = [(row, len(self.latents[row]) - count, len(self.latents[row])) for row, count in enumerate(counts)]
        latents = torch.cat([self.latents[row][first:end] for row, first, end in spans])
        keys = torch.cat([self.keys[row][first:end] for row, first, end in spans])
        return latents, keys, torch.cat([self.slots(*span) for span in spans])


def layer_of(sizes: Sizes, dtype: torch.dtype, device: str) -> LatentLayer:
    def weights(*shape: int) -> Tensor:
        scaled: Tensor = torch.randn(shape, device=device) * sizes.rank**-0.5
        return scaled.to(dtype)

    return LatentLayer(
        keys=weights(sizes.heads, sizes.nope_dim, sizes.rank),
        values=weights(sizes.heads, sizes.value_dim, sizes.rank),
        rope_dim=sizes.rope_dim,
        scale=(sizes.nope_dim + sizes.rope_dim) ** -0.5,
    )


def definition(query: Tensor, cache: Cache, layer: LatentLayer, counts: list[int]) -> Tensor:
    """Each row's last tokens attend with keys and values of their own for each head. [tokens, heads · value_dim]."""
    outs = []
    heads, nope_dim, _ = layer.keys.shape
    by_head = query.double().view(len(query), heads, -1)
    for row, queries in enumerate(by_head.split(counts)):
        latents, turned = cache.latents[row].double(), cache.keys[row].double()
        keys = torch.einsum("hnr,kr->hkn", layer.keys.double(), latents)
        values = torch.einsum("hvr,kr->hkv", layer.values.double(), latents)
        scores = torch.einsum("qhn,hkn->hqk", queries[..., :nope_dim], keys)
        scores += torch.einsum("qhp,kp->hqk", queries[..., nope_dim:], turned)
        context, count = len(latents), counts[row]
        hidden = torch.ones(count, context, dtype=torch.bool, device=query.device).triu(context - count + 1)
        weights = (scores * layer.scale).masked_fill(hidden, -torch.inf).softmax(dim=2)
        outs.append(torch.einsum("hqk,hkv->qhv", weights, values).flatten(1))
    return torch.cat(outs)


def work_of(counts: list[int], contexts: list[int], per_tile: int, device: str, *, num_decode: int = 0) -> Tensor:
    """The tiles of the rows from `num_decode` on, and two of another step."""
    lens = np.array([0] * num_decode + counts[num_decode:])
    tiles = extend_work(lens, np.array(contexts), per_tile)
    tiles[1:, 1] += num_decode
    return torch.from_numpy(np.concatenate((tiles, np.ones((2, 4), np.int32)))).to(device)


def assert_near(out: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    """Compares each token alone, so that no token hides another. Rows of zeros must be exact."""
    distance, norm = (out.double() - expected).flatten(1).norm(dim=1), expected.flatten(1).norm(dim=1)
    assert (distance <= TOLERANCE[dtype] * norm).all(), (distance / norm).tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, FP8])
def test_latents_and_keys_are_written_to_their_slots(dtype, device):
    if dtype == FP8 and device == "cuda" and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("a type of sm_89")
    sizes = Sizes(heads=1, rank=20, rope_dim=6)  # with padding
    whole = torch.randn(6, 3 + 20 + 6, device=device)  # columns of a wider tensor
    latent, key = whole[:, 3:23], whole[:, 23:]
    slots = torch.tensor([11, 0, 6, -1, 31, 14], dtype=torch.int32, device=device)
    memory = torch.full((3, 2 * 16 * sizes.width), 3.0, device=device).to(dtype)
    mine, theirs = (each[:, : 16 * sizes.width].view(3, 1, 16, sizes.width) for each in (memory, memory.clone()))
    write_latent(latent, key, mine, slots)
    written = slots >= 0
    values = torch.cat((latent, key, torch.zeros(6, sizes.width - 26, device=device)), dim=1)[written]
    at = slots[written].long()
    expected = theirs.float()
    expected[at // 16, 0, at % 16] = values.to(dtype).float()
    assert torch.equal(mine.float(), expected)
    assert (memory[:, 16 * sizes.width :].float() == 3).all()


def test_supported_sizes():
    assert supports_latent(512, 64) and supports_latent(32, 16)
    assert not supports_latent(20, 64) and not supports_latent(512, 8) and not supports_latent(512, 48)


STEP = [(1, 1), (1, 0), (1, 16), (1, 17), (1, 151), (1, 1), (5, 5), (15, 15), (17, 64), (3, 70), (33, 33)]
FEW = [(1, 129), (1, 64), (3, 65), (2, 2)]
SMALL = {"tiny": (TINY, STEP), "two tiles of heads": (MANY, STEP)}


@pytest.mark.parametrize("tile_rows", [16, 128])
@pytest.mark.parametrize("name", [*SMALL, "DeepSeek"])
def test_a_layer_equals_its_definition(name, tile_rows, device):
    """Decode rows, one of which has ended, prompts, chunks and draft tokens in one step."""
    sizes, rows = SMALL.get(name, (DEEPSEEK, FEW))
    counts, contexts = [row[0] for row in rows], [row[1] for row in rows]
    num_decode = next(i for i, count in enumerate(counts) if count > 1)
    cache, layer = (
        Cache(sizes, [max(row) for row in rows], torch.float32, device),
        layer_of(sizes, torch.float32, device),
    )
    for row, (count, context) in enumerate(rows):
        cache.write(row, 0, max(0, context - count))
    query = torch.randn(sum(counts), sizes.heads * (sizes.nope_dim + sizes.rope_dim), device=device)
    latent, key, slots = cache.new(counts)
    slots[[i for i, context in enumerate(contexts) if context == 0]] = -1
    workspace = workspace_decode(
        rows=len(rows), max_context=max(contexts), heads=sizes.heads, kv_heads=1, head_dim=sizes.rank,
        chunk=2 * sizes.block_size, num_programs=7, device=device,
    )  # fmt: skip
    lens = torch.tensor(contexts, dtype=torch.int32, device=device)
    alone = torch.arange(len(rows), device=device) < num_decode
    plan_decode(torch.where(alone, lens, 0).int(), workspace)
    out = torch.full((len(query), sizes.heads * sizes.value_dim), torch.nan, device=device)
    work = work_of(counts, contexts, tile_tokens(sizes.heads, tile_rows), device, num_decode=num_decode)
    attend_latent(
        out, query, latent, key, layer, cache.pages, slots, cache.table, lens, workspace, work, tile_rows=tile_rows,
    )  # fmt: skip
    expected = definition(query, cache, layer, counts)
    kept = torch.tensor([context > 0 for context, count in zip(contexts, counts, strict=True) for _ in range(count)])
    assert_near(out[kept], expected[kept], torch.float32)
    assert not workspace.arrivals.any()


def test_layers_of_equal_sizes_share_a_workspace(device):
    workspace = layer_of(MANY, torch.float32, device).workspace(rows=5, max_context=1000, num_programs=4)
    assert workspace.partials.shape[1:] == (20, 32) and workspace.arrivals.shape == (5, 2)


@dataclass(frozen=True, kw_only=True)
class Filled:
    """Rows whose positions are all in the cache, and queries in the space of latents."""

    cache: Cache
    query: Tensor  # [tokens, heads, rank]
    query_rope: Tensor  # [tokens, heads, rope_dim], the end of wider heads
    counts: list[int]

    @classmethod
    def of(cls, sizes: Sizes, rows: list[tuple[int, int]], dtype: torch.dtype, device: str) -> "Filled":
        counts, contexts = [row[0] for row in rows], [row[1] for row in rows]
        cache = Cache(sizes, contexts, dtype, device)
        for row, context in enumerate(contexts):
            cache.write(row, 0, context)
        working = torch.bfloat16 if dtype == FP8 else dtype
        query = torch.randn(sum(counts), sizes.heads, sizes.rank, device=device).to(working)
        rope = torch.randn(sum(counts), sizes.heads, sizes.rope_dim + 16, device=device).to(working)
        return cls(cache=cache, query=query, query_rope=rope[..., 16:], counts=counts)

    @property
    def scale(self) -> float:
        return 1.5 / math.sqrt(self.cache.sizes.rank + self.cache.sizes.rope_dim)

    def expected(self) -> Tensor:
        """In float64, of what the pages hold."""
        sizes, outs = self.cache.sizes, []
        both = torch.cat((self.query, self.query_rope), dim=2).double()
        for row, queries in enumerate(both.split(self.counts)):
            context, count = self.cache.contexts[row], self.counts[row]
            slots = self.cache.slots(row, 0, context).long()
            held = self.cache.pages[slots // sizes.block_size, 0, slots % sizes.block_size].double()
            scores = torch.einsum("qhd,kd->hqk", queries, held[:, : both.shape[2]]) * self.scale
            hidden = torch.ones(count, context, dtype=torch.bool, device=held.device).triu(context - count + 1)
            weights = scores.masked_fill(hidden, -torch.inf).softmax(dim=2)
            outs.append(torch.einsum("hqk,kr->qhr", weights, held[:, : sizes.rank]))
        return torch.cat(outs)

    def rows(self, first: int, end: int) -> tuple[Tensor, Tensor, Tensor]:
        """(query, query_rope, table) of some rows."""
        tokens = slice(sum(self.counts[:first]), sum(self.counts[:end]))
        return self.query[tokens], self.query_rope[tokens], self.cache.table[first:end]

    def decode(self, first: int = 0, end: int | None = None, *, num_programs: int = 5) -> Tensor:
        """Of the rows [first, end), which have one token each."""
        sizes, end = self.cache.sizes, len(self.counts) if end is None else end
        query, query_rope, table = self.rows(first, end)
        workspace = workspace_decode(
            rows=end - first, max_context=max(self.cache.contexts), heads=sizes.heads, kv_heads=1, head_dim=sizes.rank,
            chunk=2 * sizes.block_size, num_programs=num_programs, device=query.device,
        )  # fmt: skip
        plan_decode(torch.tensor(self.cache.contexts[first:end], dtype=torch.int32, device=query.device), workspace)
        out = torch.full_like(query, torch.nan)
        decode_attention(
            out, query, self.cache.pages, None, table, workspace, scale=self.scale, query_rope=query_rope,
        )  # fmt: skip
        return out

    def extend(self, *, tile_rows: int = 64, per_tile: int | None = None) -> Tensor:
        sizes, contexts = self.cache.sizes, self.cache.contexts
        device = str(self.query.device)
        work = work_of(self.counts, contexts, per_tile or tile_tokens(sizes.heads, tile_rows), device)
        out = torch.full_like(self.query, torch.nan)
        extend_attention(
            out, self.query, self.cache.pages, None, self.cache.table,
            torch.tensor(contexts, dtype=torch.int32, device=device), work, scale=self.scale,
            query_rope=self.query_rope, tile_rows=tile_rows, per_tile=per_tile, num_programs=5,
        )  # fmt: skip
        return out


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, FP8])
@pytest.mark.parametrize("name", [*SMALL, "DeepSeek"])
def test_rounded_types(name, dtype, device):
    if dtype == FP8 and device == "cuda" and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("a type of sm_89")
    sizes, _ = SMALL.get(name, (DEEPSEEK, FEW))
    rows = [(1, 1), (1, 63), (1, 64), (1, 65), (1, 131)]
    filled = Filled.of(sizes, rows, dtype, device)
    expected = filled.expected()
    assert_near(filled.decode(), expected, dtype)
    assert_near(filled.extend(), expected, dtype)


def test_a_row_has_the_same_bits_in_any_batch(device):
    filled = Filled.of(MANY, [(1, 1), (1, 128), (1, 129), (1, 300), (1, 64)], torch.bfloat16, device)
    together = filled.decode()
    assert_near(together, filled.expected(), torch.bfloat16)
    assert torch.equal(together, filled.decode(num_programs=1))
    for row in range(5):
        assert torch.equal(together[row : row + 1], filled.decode(row, row + 1, num_programs=3))


@pytest.mark.parametrize("sizes", [TINY, MANY])
def test_a_token_has_the_same_bits_with_any_chunks_and_tiles(sizes, device):
    """The rows are chunks of one prompt."""
    whole = Filled.of(sizes, [(75, 75)], torch.bfloat16, device)
    expected = whole.extend()
    assert_near(expected, whole.expected(), torch.bfloat16)
    for per_tile in (1, 3, 10):
        assert torch.equal(expected, whole.extend(per_tile=per_tile))
    table = whole.cache.table
    counts, ends = [30, 1, 16, 28], [30, 31, 47, 75]
    whole.cache.contexts, whole.cache.table = ends, table.expand(4, -1)
    chunks = Filled(cache=whole.cache, query=whole.query, query_rope=whole.query_rope, counts=counts)
    assert torch.equal(expected, chunks.extend())


def test_a_row_without_context_gives_zeros(device):
    """The row has ended on the device before the host knows."""
    filled = Filled.of(TINY, [(20, 20)], torch.float32, device)
    work = work_of([20], [20], 5, device)
    out = torch.full_like(filled.query, torch.nan)
    extend_attention(
        out, filled.query, filled.cache.pages, None, filled.cache.table,
        torch.zeros(1, dtype=torch.int32, device=device), work, scale=0.2, query_rope=filled.query_rope, tile_rows=16,
        per_tile=5, num_programs=5,
    )  # fmt: skip
    assert not out.any()
