"""Paged attention of prompts, chunks of prompts, draft tokens and decode rows in one launch, against float64."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from pagewire.kernels import reference
from pagewire.kernels.triton.decode_attention import Slopes, decode_attention, plan_decode, workspace_decode
from pagewire.kernels.triton.extend_attention import extend_attention, extend_work, max_tiles, tile_tokens

BIG = torch.cuda.is_available()
FP8 = torch.float8_e4m3fn
TOLERANCE = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 5e-3, FP8: 5e-3}
CASES = [  # type of pages, heads, kv heads, head_dim, block size, rows of a tile
    (torch.float32, 2, 2, 16, 16, 16),
    (torch.float32, 14, 2, 16, 64, 64),
    (torch.bfloat16, 4, 2, 128, 64, 128),
    (torch.bfloat16, 8, 2, 64, 16, 64),
    (torch.float16, 8, 1, 64, 64, 128),
    (FP8, 8, 2, 64, 64, 64),
    (torch.bfloat16, 4, 2, 256, 64, 128),  # programs of a half of the tile, which take halves of pages
    (torch.float32, 2, 1, 256, 64, 64),
]
if BIG:
    CASES += [
        (dtype, heads, 8, 128, 64, tile_rows)
        for dtype in (torch.bfloat16, FP8)
        for heads in (16, 32)
        for tile_rows in (16, 64, 128)
    ]
OPTIONS = [{"window": 20}, {"window": 70, "softcap": 3.0}, {"sinks": True}]
QUICK = (1, 3, 7, 16)
GROUPS = [pytest.param(group, marks=[] if group in QUICK else pytest.mark.long) for group in range(1, 17)]


def steps_of(block_size: int) -> tuple[list[int], list[int]]:
    """(query_lens, context_lens): prompts, prefix hits, draft tokens, decode rows and a row without tokens."""
    rows = [
        (1, 1),
        (block_size - 1, block_size - 1),
        (block_size, block_size),
        (block_size + 1, block_size + 1),
        (0, 40),
        (1, 2 * block_size),
        (1, 2 * block_size + 1),
        (5, 3 * block_size + 2),
        (block_size, 2 * block_size),
        (50, block_size + 71),
    ]
    if BIG:
        rows += [(1000, 1000), (513, 4096), (1, 3000), (8, 2001), (4096, 5000)]
    return [row[0] for row in rows], [row[1] for row in rows]


def pages_of(counts, contexts, case, device, *, window: int | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """(k_pages, v_pages, block_table): NaN beyond the end of each row and in pages that lie before its windows."""
    dtype, _, kv_heads, head_dim, block_size, _ = case
    blocks = [-(-context // block_size) for context in contexts]
    unused_block = sum(blocks)
    table = torch.full((len(contexts), max(blocks) + 1), unused_block, dtype=torch.int32)
    hidden = torch.ones(unused_block + 1, block_size, dtype=torch.bool)
    shuffled = torch.randperm(unused_block, dtype=torch.int32).split(blocks)
    for row, (count, context, own) in enumerate(zip(counts, contexts, shuffled, strict=True)):
        table[row, : len(own)] = own
        first = 0 if window is None else max(0, context - count + 1 - window)
        held = torch.arange(first // block_size * block_size, context)
        hidden[own[held // block_size].long(), held % block_size] = False
    pages = torch.randn(2, unused_block + 1, kv_heads, block_size, head_dim).masked_fill_(
        hidden[:, None, :, None], torch.nan
    )
    pages = pages.transpose(0, 1).to(dtype).contiguous().to(device)  # a page holds keys and values
    return pages[:, 0], pages[:, 1], table.to(device)


def queries_of(tokens, case, device) -> Tensor:
    dtype, heads, _, head_dim, _, _ = case
    return torch.randn(tokens, heads, head_dim, dtype=torch.bfloat16 if dtype == FP8 else dtype, device=device)


def expected_of(
    query, k_pages, v_pages, table, counts, contexts, *, window=None, softcap=None, sinks=None, **scales
) -> Tensor:
    """softmax(q · kᵀ · scale, and the sink) · v of every token, in float64."""
    outs = []
    block_size = k_pages.shape[2]
    group = query.shape[1] // k_pages.shape[1]
    exact = k_pages.double(), v_pages.double()
    for row, queries in enumerate(query.double().split(counts)):
        first = 0 if window is None else max(0, contexts[row] - counts[row] + 1 - window)
        key = torch.arange(first, contexts[row], device=query.device)
        blocks = table[row, key // block_size].long()
        keys, values = (pages[blocks, :, key % block_size].repeat_interleave(group, 1) for pages in exact)
        scores = torch.einsum("qhd,khd->hqk", queries, keys) * scales["scale"] * scales.get("k_scale", 1)
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        position = torch.arange(contexts[row] - counts[row], contexts[row], device=query.device)[:, None]
        visible = (key <= position) & (key > position - (window or 1 << 30))
        scores = scores.masked_fill(~visible, -torch.inf)
        if sinks is not None:
            scores = torch.cat((scores, sinks.double()[:, None, None].expand(-1, counts[row], 1)), dim=2)
        weights = scores.softmax(dim=2)[:, :, : len(key)]
        outs.append(torch.einsum("hqk,khd->qhd", weights, values) * scales.get("v_scale", 1))
    return torch.cat(outs)


def attend(query, pages, counts, contexts, case, *, out=None, spare_tiles=2, num_programs=5, **options) -> Tensor:
    """spare_tiles: of another step, behind the list."""
    _, heads, kv_heads, _, _, tile_rows = case
    tiles = extend_work(np.array(counts), np.array(contexts), tile_tokens(heads // kv_heads, tile_rows))
    work = torch.ones(len(tiles) + spare_tiles, 4, dtype=torch.int32)
    work[: len(tiles)] = torch.from_numpy(tiles)
    out = torch.full_like(query, torch.nan) if out is None else out
    lens = torch.tensor(contexts, dtype=torch.int32, device=query.device)
    programs = 400 if BIG else num_programs
    extend_attention(
        out, query, *pages, lens, work.to(query.device), tile_rows=tile_rows, num_programs=programs, **options
    )
    return torch.as_tensor(out)


def assert_near(out: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    """Compares each token alone, so that no token hides another."""
    distance, norm = (out.double() - expected).flatten(1).norm(dim=1), expected.flatten(1).norm(dim=1)
    assert (distance <= TOLERANCE[dtype] * norm).all(), (distance / norm).max()


def options_of(option, case, device):
    """Arguments that both the kernel and the reference take."""
    dtype, heads, _, head_dim, _, _ = case
    options: dict[str, Any] = {"scale": head_dim**-0.5 * 1.5, **option}
    if "sinks" in option:
        options["sinks"] = torch.randn(heads, device=device) * 2
    if dtype == FP8:
        options |= {"k_scale": 1.25, "v_scale": 0.5}
    return options


@pytest.mark.parametrize("case", CASES)
def test_every_kind_of_row(case, device):
    counts, contexts = steps_of(case[-2])
    query, pages = queries_of(sum(counts), case, device), pages_of(counts, contexts, case, device)
    options = options_of({}, case, device)
    out = attend(query, pages, counts, contexts, case, **options)
    assert_near(out, expected_of(query, *pages, counts, contexts, **options), case[0])


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("case", CASES[1:4:2] + CASES[8:])
def test_windows_softcaps_and_sinks(case, option, device):
    counts, contexts = steps_of(case[-2])
    query = queries_of(sum(counts), case, device)
    pages = pages_of(counts, contexts, case, device, window=option.get("window"))
    options = options_of(option, case, device)
    out = attend(query, pages, counts, contexts, case, **options)
    assert_near(out, expected_of(query, *pages, counts, contexts, **options), case[0])


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("group", GROUPS)
def test_every_option_with_every_size(group, head_dim, device):
    """A prompt, a chunk whose windows begin in several pages, and draft tokens."""
    case = (torch.bfloat16, group, 1, head_dim, 64, 128)
    counts, contexts = [65, 30, 3], [65, 150, 70]
    query = queries_of(sum(counts), case, device)
    for option in ({"window": 50}, {"softcap": 3.0}, {"sinks": True}, {"window": 50, "sinks": True}):
        pages = pages_of(counts, contexts, case, device, window=option.get("window"))
        options = options_of(option, case, device)
        out = attend(query, pages, counts, contexts, case, **options)
        assert_near(out, expected_of(query, *pages, counts, contexts, **options), case[0])


@pytest.mark.parametrize("window", [None, 20])
def test_a_token_has_the_same_bits_with_any_chunks_of_its_prompt(window, device):
    case = CASES[3]
    prompt = 75
    query, pages = queries_of(prompt, case, device), pages_of([prompt], [prompt], case, device)
    whole = attend(query, pages, [prompt], [prompt], case, scale=0.2, window=window)
    pieces = torch.full_like(query, torch.nan)
    done = 0
    for count in (30, 1, 16, 28):
        part = slice(done, done + count)
        done += count
        attend(query[part], pages, [count], [done], case, out=pieces[part], scale=0.2, window=window)
    assert torch.equal(whole, pieces)
    other = queries_of(9, case, device)
    both = attend(
        torch.cat((other, query)), (*pages[:2], pages[2].expand(2, -1)), [9, prompt], [9, prompt], case,
        scale=0.2, window=window,
    )  # fmt: skip
    assert torch.equal(whole, both[9:])


def test_the_number_of_programs_changes_nothing(device):
    """Fewer than there are tiles, so that each takes some, and more. A step without tiles writes nothing."""
    case = CASES[3]
    counts, contexts = [40, 3, 21], [40, 50, 90]
    query, pages = queries_of(sum(counts), case, device), pages_of(counts, contexts, case, device)
    outs = [
        attend(query, pages, counts, contexts, case, scale=0.2, num_programs=n, spare_tiles=30) for n in (1, 3, 500)
    ]
    assert all(torch.equal(outs[0], out) for out in outs)
    assert attend(query, pages, [0, 0, 0], contexts, case, scale=0.2).isnan().all()


@pytest.mark.parametrize("case", [CASES[0], CASES[3]])
def test_decode_rows_equal_those_of_decode_attention(case, device):
    dtype, heads, kv_heads, head_dim, block_size, _ = case
    contexts = [1, block_size, 4 * block_size + 3]
    query, pages = queries_of(3, case, device), pages_of([1, 1, 1], contexts, case, device)
    out = attend(query, pages, [1, 1, 1], contexts, case, scale=0.2)
    workspace = workspace_decode(
        rows=3, max_context=max(contexts), heads=heads, kv_heads=kv_heads, head_dim=head_dim, chunk=2 * block_size,
        num_programs=4,
        device=device,
    )  # fmt: skip
    plan_decode(torch.tensor(contexts, dtype=torch.int32, device=device), workspace)
    decoded = torch.full_like(query, torch.nan)
    decode_attention(decoded, query, *pages, workspace, scale=0.2)
    assert_near(decoded, out.double(), dtype)


def test_a_row_without_context_gives_zeros_and_padding_is_not_written(device):
    """The row has ended on the device before the host knows. The padding is that of a captured graph."""
    case = CASES[0]
    query, pages = queries_of(40, case, device), pages_of([37], [37], case, device)
    work = torch.from_numpy(extend_work(np.array([37]), np.array([37]), 16)).to(device)
    out = torch.full_like(query, torch.nan)
    no_context = torch.zeros(1, dtype=torch.int32, device=device)
    extend_attention(out, query, *pages, no_context, work, scale=0.2, tile_rows=16, num_programs=2)
    assert not out[:37].any() and out[37:].isnan().all()


def test_a_row_may_be_shorter_on_the_device_than_the_host_assumes(device):
    """The host assumes 3 tokens more. Pages beyond the length on the device hold NaN."""
    case = CASES[3]
    counts, contexts, assumed = [4, 20], [36, 47], [39, 50]
    query, pages = queries_of(24, case, device), pages_of(counts, contexts, case, device)
    work = torch.from_numpy(extend_work(np.array(counts), np.array(assumed), tile_tokens(4, 64))).to(device)
    out = torch.full_like(query, torch.nan)
    lens = torch.tensor(contexts, dtype=torch.int32, device=device)
    extend_attention(out, query, *pages, lens, work, scale=0.2, tile_rows=64, num_programs=9)
    assert_near(out, expected_of(query, *pages, counts, contexts, scale=0.2), case[0])


def test_tiles_hold_every_token_once_and_come_longest_first():
    rng = np.random.default_rng(0)
    for per_tile in (1, 9, 64):
        counts = rng.integers(0, 200, 30)
        contexts = counts + rng.integers(0, 500, 30)
        work = extend_work(counts, contexts, per_tile)
        assert work.dtype == np.int32 and work[0].tolist() == [len(work) - 1, 0, 0, 0]
        assert len(work) <= 1 + max_tiles(int(counts.sum()), len(counts), per_tile)
        starts = np.cumsum(counts) - counts
        tokens, keys = [], []
        for row, token, number, remaining in work[1:].tolist():
            assert 0 < number <= per_tile and number == min(per_tile, remaining)
            assert remaining == starts[row] + counts[row] - token
            tokens += range(token, token + number)
            keys.append(contexts[row] - remaining + number)
        assert sorted(tokens) == list(range(counts.sum()))
        assert keys == sorted(keys, reverse=True)
    assert extend_work(np.array([0, 0]), np.array([5, 0]), 4).tolist() == [[0, 0, 0, 0]]
    assert max_tiles(10, 10, 4) == 10 and max_tiles(64, 1, 64) == 1


ODD = [  # heads, kv heads, dimension of keys, and of values
    (4, 4, 8, 8),
    (4, 2, 80, 80),
    (2, 1, 96, 96),
    (4, 1, 192, 128),
    (3, 1, 24, 40),
    (2, 1, 512, 512),
    (71, 1, 16, 16),
]


class Odd:
    """Rows whose keys and values may differ in size, of pages of 16 positions. What no row has is NaN."""

    def __init__(self, device, sizes, counts, contexts, dtype=torch.float32) -> None:
        self.heads, self.kv_heads, dim, value_dim = sizes
        self.counts, self.contexts, self.value_dim = counts, contexts, value_dim
        blocks = [-(-context // 16) for context in contexts]
        unused = sum(blocks)
        table = torch.full((len(contexts), max(blocks) + 1), unused, dtype=torch.int32)
        hidden = torch.ones(unused + 1, 16, dtype=torch.bool)
        for row, own in enumerate(torch.randperm(unused, dtype=torch.int32).split(blocks)):
            table[row, : len(own)] = own
            held = torch.arange(contexts[row])
            hidden[own[held // 16].long(), held % 16] = False
        per_token = (self.kv_heads * dim, self.kv_heads * value_dim)
        whole = torch.randn(unused + 1, 16 * sum(per_token)).to(dtype)
        parts = whole.split([16 * width for width in per_token], dim=1)
        pages = [part.unflatten(1, (self.kv_heads, 16, -1)) for part in parts]
        for part in pages:
            part.masked_fill_(hidden[:, None, :, None], torch.nan)
        whole = whole.to(device)
        parts = whole.split([16 * width for width in per_token], dim=1)
        self.k_pages, self.v_pages = (part.unflatten(1, (self.kv_heads, 16, -1)) for part in parts)
        self.table = table.to(device)
        self.query = torch.randn(sum(counts), self.heads, dim, device=device).to(dtype)
        self.scale = dim**-0.5 * 1.5

    def exact(self, *, window=None, chunk=None, slopes=None) -> Tensor:
        lens = (torch.tensor(self.contexts), torch.tensor(self.counts))
        alibi = {} if slopes is None else {"rounded": slopes.is_rounded, "before_scale": slopes.scale != 1.0}
        pages = (each.float().transpose(1, 2).cpu() for each in (self.k_pages, self.v_pages))
        return reference.paged_attention(
            self.query.float().cpu(), *pages, self.table.cpu(), *lens, self.scale, window, None, chunk=chunk,
            slopes=None if slopes is None else slopes.values.cpu(), **alibi,
        ).to(self.query.device)  # fmt: skip

    def extend(self, *, window=None, chunk=None, slopes=None, tile_rows=16) -> Tensor:
        tiles = extend_work(
            np.array(self.counts), np.array(self.contexts), tile_tokens(self.heads // self.kv_heads, tile_rows)
        )
        out = self._out()
        lens = torch.tensor(self.contexts, dtype=torch.int32, device=out.device)
        work = torch.from_numpy(tiles).to(out.device)
        extend_attention(
            out, self.query, self.k_pages, self.v_pages, self.table, lens, work, scale=self.scale, num_programs=5,
            window=window or chunk, is_chunked=chunk is not None, slopes=slopes, tile_rows=tile_rows,
        )  # fmt: skip
        return out

    def decode(self, *, window=None, chunk=None, slopes=None) -> Tensor:
        """Of rows of one token."""
        out = self._out()
        workspace = workspace_decode(
            rows=len(self.contexts), max_context=max(self.contexts), heads=self.heads, kv_heads=self.kv_heads,
            head_dim=self.value_dim, num_programs=5, window=window or chunk, is_chunked=chunk is not None, chunk=16,
            device=out.device,
        )  # fmt: skip
        plan_decode(torch.tensor(self.contexts, dtype=torch.int32, device=out.device), workspace)
        pages = (self.k_pages, self.v_pages)
        decode_attention(out, self.query, *pages, self.table, workspace, scale=self.scale, slopes=slopes)
        return out

    def _out(self) -> Tensor:
        shape = (*self.query.shape[:2], self.value_dim)
        return torch.full(shape, torch.nan, dtype=self.query.dtype, device=self.query.device)


@pytest.mark.parametrize("sizes", ODD, ids=str)
def test_heads_of_any_size(sizes, device):
    prompts = Odd(device, sizes, [5, 1, 18], [5, 40, 50])
    assert_near(prompts.extend(), prompts.exact(), torch.float32)
    rows = Odd(device, sizes, [1, 1, 1], [1, 17, 90])
    assert_near(rows.decode(), rows.exact(), torch.float32)
    assert_near(rows.decode(window=20), rows.exact(window=20), torch.float32)


def test_narrow_types_of_heads_that_are_no_power_of_two(device):
    rows = Odd(device, (4, 2, 80, 48), [1, 1], [33, 70], torch.bfloat16)
    assert_near(rows.decode(), rows.exact().double(), torch.bfloat16)
    assert_near(rows.extend(tile_rows=64), rows.exact().double(), torch.bfloat16)


@pytest.mark.parametrize("chunk", [16, 24, 32, 200])
def test_a_token_sees_its_chunk_of_positions(chunk, device):
    """Prompts that begin and end in the midst of chunks, and several chunks in one tile of tokens."""
    prompts = Odd(device, (4, 2, 16, 16), [70, 33, 1], [70, 90, 49])
    assert_near(prompts.extend(chunk=chunk, tile_rows=64), prompts.exact(chunk=chunk), torch.float32)
    rows = Odd(device, (4, 2, 16, 16), [1] * 6, [1, chunk, chunk + 1, 2 * chunk, 2 * chunk + 7, 3 * chunk + 1])
    assert_near(rows.decode(chunk=chunk), rows.exact(chunk=chunk), torch.float32)


def test_pages_before_the_chunk_are_not_read(device):
    rows = Odd(device, (2, 1, 16, 16), [1], [75])
    rows.k_pages[rows.table[0, :4].long()] = torch.nan  # positions 0 … 63; the chunk begins at 64
    rows.v_pages[rows.table[0, :4].long()] = torch.nan
    assert not rows.decode(chunk=32).isnan().any()
    assert not rows.extend(chunk=32).isnan().any()


@pytest.mark.parametrize(("before_scale", "is_rounded"), [(False, False), (True, True)])
def test_alibi(before_scale, is_rounded, device):
    values = torch.tensor([0.5, 0.25, 0.0625, 0.011], device=device)
    values = values.bfloat16().float() if is_rounded else values
    for case in (Odd(device, (4, 4, 24, 24), [20, 1, 3], [20, 60, 47]), Odd(device, (4, 1, 16, 16), [1, 1], [33, 90])):
        slopes = Slopes(values, case.scale if before_scale else 1.0, is_rounded)
        assert_near(case.extend(slopes=slopes), case.exact(slopes=slopes), torch.float32)
        if case.counts == [1, 1]:
            assert_near(case.decode(slopes=slopes), case.exact(slopes=slopes), torch.float32)
