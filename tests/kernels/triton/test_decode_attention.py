"""Paged decode attention against float64, over odd lengths. Every position that a row may not read is NaN."""

import pytest
import torch
from torch import Tensor

from pagewire.kernels.triton.decode_attention import (
    MAX_CHUNKS,
    DecodeWorkspace,
    decode_attention,
    plan_decode,
    workspace_decode,
)

BIG = torch.cuda.is_available()
FP8 = torch.float8_e4m3fn
TOLERANCE = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 5e-3, FP8: 5e-3}
CASES = [  # type of pages, heads, kv heads, head_dim, block size
    (torch.float32, 2, 2, 16, 16),
    (torch.float32, 14, 2, 16, 64),
    (torch.bfloat16, 4, 2, 128, 64),
    (torch.bfloat16, 8, 2, 64, 16),
    (torch.float16, 8, 1, 64, 64),
    (FP8, 8, 2, 64, 64),
    (torch.bfloat16, 4, 2, 256, 64),  # tiles of a half of a page,
    (torch.float32, 2, 1, 256, 64),  # and of a quarter
    (torch.float32, 40, 2, 16, 16),  # more heads than a tile has rows
]
if BIG:
    CASES += [(dtype, heads, 8, 128, 64) for dtype in (torch.bfloat16, FP8) for heads in (16, 32)]
OPTIONS = [{}, {"window": 20}, {"window": 64, "softcap": 3.0}, {"sinks": True}]
QUICK = (1, 3, 7, 16)
GROUPS = [pytest.param(group, marks=[] if group in QUICK else pytest.mark.long) for group in range(1, 17)]


def lengths(block_size: int) -> list[int]:
    """Lengths around the edges of blocks and, with chunks of two blocks, of chunks."""
    edges = [0, 1, block_size - 1, block_size, block_size + 1, 2 * block_size, 2 * block_size + 1, 5 * block_size + 7]
    return edges + ([1000, 4096, 10_001] * 4 if BIG else [])


def pages_of(contexts, case, device, *, window: int | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """(k_pages, v_pages, block_table): NaN where no row may read, beyond its end and before its window."""
    dtype, _, kv_heads, head_dim, block_size = case
    blocks = [-(-context // block_size) for context in contexts]
    unused_block = sum(blocks)
    table = torch.full((len(contexts), max(blocks) + 1), unused_block, dtype=torch.int32)
    hidden = torch.ones(unused_block + 1, block_size, dtype=torch.bool)
    shuffled = torch.randperm(unused_block, dtype=torch.int32).split(blocks)
    for row, (context, own) in enumerate(zip(contexts, shuffled, strict=True)):
        table[row, : len(own)] = own
        visible = torch.arange(0 if window is None else max(0, context - window), context)
        hidden[own[visible // block_size].long(), visible % block_size] = False
    pages = torch.randn(2, unused_block + 1, kv_heads, block_size, head_dim).masked_fill_(
        hidden[:, None, :, None], torch.nan
    )
    pages = pages.transpose(0, 1).to(dtype).contiguous().to(device)  # a page holds keys and values
    return pages[:, 0], pages[:, 1], table.to(device)


def queries_of(rows, case, device) -> Tensor:
    dtype, heads, _, head_dim, _ = case
    return torch.randn(rows, heads, head_dim, dtype=torch.bfloat16 if dtype == FP8 else dtype, device=device)


def expected_of(query, k_pages, v_pages, table, contexts, *, window=None, softcap=None, sinks=None, **scales) -> Tensor:
    """softmax(q · kᵀ · scale, and the sink) · v of every row, in float64."""
    out = torch.zeros(query.shape, dtype=torch.float64, device=query.device)
    block_size = k_pages.shape[2]
    group = query.shape[1] // k_pages.shape[1]
    exact = k_pages.double(), v_pages.double()
    for row, context in enumerate(contexts):
        visible = torch.arange(0 if window is None else max(0, context - window), context, device=query.device)
        blocks = table[row, visible // block_size].long()
        keys, values = (pages[blocks, :, visible % block_size].repeat_interleave(group, 1) for pages in exact)
        scores = torch.einsum("hd,khd->hk", query[row].double(), keys) * scales["scale"] * scales.get("k_scale", 1)
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        if sinks is not None:
            scores = torch.cat((scores, sinks[:, None].double()), dim=1)
        weights = scores.softmax(dim=1)[:, : len(visible)]
        out[row] = torch.einsum("hk,khd->hd", weights, values) * scales.get("v_scale", 1)
    return out


def workspace_of(rows, max_context, case, device, window=None) -> DecodeWorkspace:
    _, heads, kv_heads, head_dim, block_size = case
    return workspace_decode(
        rows=rows, max_context=max_context, heads=heads, kv_heads=kv_heads, head_dim=head_dim, window=window,
        chunk=2 * block_size, device=device,
    )  # fmt: skip


def attend(query, pages, contexts, case, *, window=None, num_programs=7, workspace=None, **options) -> Tensor:
    if workspace is None:
        workspace = workspace_of(len(contexts), max(contexts), case, query.device, window)
    out = torch.full_like(query, torch.nan)
    plan_decode(torch.tensor(contexts, dtype=torch.int32, device=query.device), workspace)
    decode_attention(out, query, *pages, workspace, num_programs=400 if BIG else num_programs, **options)
    assert not workspace.arrivals.any()
    return out


def assert_near(out: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    """Compares each row alone, so that a long row cannot hide a short one. Rows of zeros must be exact."""
    distance, norm = (out.double() - expected).flatten(1).norm(dim=1), expected.flatten(1).norm(dim=1)
    assert (distance <= TOLERANCE[dtype] * norm).all(), (distance / norm).tolist()


def options_of(option, case, device):
    """Arguments that both the kernel and the reference take."""
    dtype, heads, _, head_dim, _ = case
    options = {"scale": head_dim**-0.5 * 1.5, **option}
    if "sinks" in option:
        options["sinks"] = torch.randn(heads, device=device) * 2
    if dtype == FP8:
        options |= {"k_scale": 1.25, "v_scale": 0.5}
    return options


@pytest.mark.parametrize("case", CASES)
def test_every_context_length(case, device):
    contexts = lengths(case[-1])
    query, pages = queries_of(len(contexts), case, device), pages_of(contexts, case, device)
    options = options_of({}, case, device)
    out = attend(query, pages, contexts, case, **options)
    assert_near(out, expected_of(query, *pages, contexts, **options), case[0])
    assert not out[0].any()


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("case", CASES[1:4:2] + CASES[9:])
def test_windows_softcaps_and_sinks(case, option, device):
    contexts = lengths(case[-1])
    query = queries_of(len(contexts), case, device)
    pages = pages_of(contexts, case, device, window=option.get("window"))
    options = options_of(option, case, device)
    out = attend(query, pages, contexts, case, **options)
    assert_near(out, expected_of(query, *pages, contexts, **options), case[0])


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("group", GROUPS)
def test_every_option_with_every_size(group, head_dim, device):
    """A row of two chunks, rows at the edges of pages, and windows that begin in the midst of a tile."""
    case = (torch.bfloat16, group, 1, head_dim, 64)
    contexts = [1, 64, 65, 170]
    query = queries_of(len(contexts), case, device)
    for option in ({"window": 50}, {"softcap": 3.0}, {"sinks": True}, {"window": 50, "sinks": True}):
        pages = pages_of(contexts, case, device, window=option.get("window"))
        options = options_of(option, case, device)
        out = attend(query, pages, contexts, case, **options)
        assert_near(out, expected_of(query, *pages, contexts, **options), case[0])


@pytest.mark.parametrize("window", [None, 40])
def test_a_row_has_the_same_bits_in_any_batch(window, device):
    case = CASES[3]
    contexts = [0, 80, 33, 32, 97]
    query, pages = queries_of(len(contexts), case, device), pages_of(contexts, case, device, window=window)
    together = attend(query, pages, contexts, case, scale=0.2, window=window)
    assert torch.equal(together, attend(query, pages, contexts, case, scale=0.2, window=window, num_programs=1))
    for row, context in enumerate(contexts):
        own = (*pages[:2], pages[2][row : row + 1])
        alone = attend(query[row : row + 1], own, [context], case, scale=0.2, window=window, num_programs=3)
        assert torch.equal(alone, together[row : row + 1])


def test_one_workspace_serves_many_steps_and_layers(device):
    """The rows grow, and may be fewer than the workspace has room for."""
    case = CASES[3]
    workspace = workspace_of(8, 200, case, device)
    first = None
    for contexts in ([100, 40, 7], [101, 0], [100, 40, 7], [101, 41, 8, 1, 1, 1, 1, 1]):
        torch.manual_seed(len(contexts))
        query, pages = queries_of(len(contexts), case, device), pages_of(contexts, case, device)
        outs = [attend(query, pages, contexts, case, scale=0.1, workspace=workspace) for _ in range(200 if BIG else 2)]
        assert_near(outs[0], expected_of(query, *pages, contexts, scale=0.1), case[0])
        assert all(torch.equal(outs[0], out) for out in outs)
        if len(contexts) == 3:
            first = outs[0] if first is None else first
            assert torch.equal(first, outs[0])


def test_rows_of_queries_and_outputs_need_not_be_contiguous(device):
    case = CASES[0]
    contexts = [20, 5]
    pages = pages_of(contexts, case, device)
    fused = torch.randn(2, 6, 16, device=device)
    out = torch.full((2, 3, 16), torch.nan, device=device)
    workspace = workspace_of(2, 20, case, device)
    plan_decode(torch.tensor(contexts, dtype=torch.int32, device=device), workspace)
    decode_attention(out[:, 1:], fused[:, :2], *pages, workspace, scale=0.3, num_programs=2)
    assert_near(out[:, 1:], expected_of(fused[:, :2], *pages, contexts, scale=0.3), case[0])
    assert out[:, 0].isnan().all()


def test_a_very_long_row_takes_longer_chunks(device):
    case = (torch.float32, 1, 1, 16, 16)
    contexts = [(MAX_CHUNKS + 2) * 32 + 5, 33]
    query, pages = queries_of(2, case, device), pages_of(contexts, case, device)
    workspace = workspace_of(2, max(contexts), case, device)
    out = attend(query, pages, contexts, case, scale=0.25, workspace=workspace)
    assert_near(out, expected_of(query, *pages, contexts, scale=0.25), case[0])


def chunks_of(context: int, window: int | None, chunk: int) -> list[tuple[int, int]]:
    """(start, end) of the chunks into which `plan_decode` must split a row."""
    start = 0 if window is None else max(0, context - window)
    size = chunk
    while -(-context // size) - start // size > MAX_CHUNKS:
        size *= 2
    first = start // size * size
    return [(max(start, at), min(at + size, context)) for at in range(first, context, size)] or [(0, 0)]


@pytest.mark.parametrize("window", [None, 1, 300, 40_000])
def test_plan_decode_splits_rows_into_chunks(window, device):
    edge = MAX_CHUNKS * 256
    contexts = [0, 1, 255, 256, 257, 300, 301, 5000, 0, edge, edge + 1, 2 * edge + 1, 131_072, 7]
    workspace = workspace_decode(
        rows=20, max_context=131_072, heads=2, kv_heads=1, head_dim=16, window=window, device=device
    )
    workspace.items.fill_(-1)
    plan_decode(torch.tensor(contexts, dtype=torch.int32, device=device), workspace)
    expected = []
    for row, context in enumerate(contexts):
        chunks = chunks_of(context, window, 256)
        expected += [[row, *chunk, number, len(chunks)] for number, chunk in enumerate(chunks)]
    assert workspace.num_items.item() == len(expected) <= len(workspace.items)
    assert workspace.items[: len(expected)].tolist() == expected
    assert (workspace.items[len(expected) :] == -1).all()
