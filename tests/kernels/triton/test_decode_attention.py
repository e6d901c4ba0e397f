"""Paged decode attention against float64, over odd lengths. Every position that a row may not read is NaN."""

import pytest
import torch
from torch import Tensor

from pagewire.kernels.triton.decode_attention import (
    CHUNK,
    DecodeWorkspace,
    cuts_of,
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


def workspace_of(rows, max_context, case, device, window=None, *, num_programs=7, chunk=None) -> DecodeWorkspace:
    _, heads, kv_heads, head_dim, block_size = case
    return workspace_decode(
        rows=rows, max_context=max_context, heads=heads, kv_heads=kv_heads, head_dim=head_dim, window=window,
        chunk=chunk or 2 * block_size, num_programs=400 if BIG else num_programs, device=device,
    )  # fmt: skip


def attend(query, pages, contexts, case, *, window=None, num_programs=7, chunk=None, workspace=None, **options):
    """The rows' outputs; zeros for rows without keys."""
    if workspace is None:
        sizes = {"num_programs": num_programs, "chunk": chunk}
        workspace = workspace_of(len(contexts), max(contexts), case, query.device, window, **sizes)
    out = torch.full_like(query, torch.nan)
    lens = torch.tensor(contexts, dtype=torch.int32, device=query.device)
    plan_decode(lens, workspace)
    decode_attention(out, query, *pages, workspace, **options)
    assert not workspace.arrivals.any()
    assert out[lens == 0].isnan().all(), "rows without keys are not written"
    out[lens == 0] = 0
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
    for row, context in enumerate(contexts[1:], start=1):
        own = (*pages[:2], pages[2][row : row + 1])
        alone = attend(query[row : row + 1], own, [context], case, scale=0.2, window=window, num_programs=3)
        assert torch.equal(alone, together[row : row + 1])


@pytest.mark.parametrize("option", [{}, {"window": 100, "sinks": True}])
def test_runs_and_chunks_give_the_same_bits(option, device):
    """Rows around each end of a chunk and of a run, computed as whole runs, as chunks, and as some of each."""
    case = (torch.float32, 2, 1, 16, 16)
    chunks, _ = cuts_of(16)
    ends = [CHUNK, 2 * CHUNK, (chunks - 1) * CHUNK, chunks * CHUNK, (chunks + 1) * CHUNK, 2 * chunks * CHUNK]
    contexts = [end + more for end in ends for more in (-1, 0, 1)]
    window = option.get("window")
    query, pages = queries_of(len(contexts), case, device), pages_of(contexts, case, device, window=window)
    options = options_of(option, case, device)
    sizes = {"chunk": CHUNK}
    whole = attend(query, pages, contexts, case, num_programs=1, **sizes, **options)
    assert_near(whole, expected_of(query, *pages, contexts, **options), case[0])
    for num_programs in (5, 13, 1000):
        assert torch.equal(whole, attend(query, pages, contexts, case, num_programs=num_programs, **sizes, **options))
    last = (*pages[:2], pages[2][-1:])
    assert torch.equal(whole[-1:], attend(query[-1:], last, contexts[-1:], case, num_programs=9, **sizes, **options))


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
    decode_attention(out[:, 1:], fused[:, :2], *pages, workspace, scale=0.3)
    assert_near(out[:, 1:], expected_of(fused[:, :2], *pages, contexts, scale=0.3), case[0])
    assert out[:, 0].isnan().all()


def test_a_very_long_row_takes_longer_chunks(device):
    case = (torch.float32, 1, 1, 16, 16)
    chunks, most_runs = cuts_of(16)
    contexts = [most_runs * chunks * 16 + 37, 33]
    query, pages = queries_of(2, case, device), pages_of(contexts, case, device)
    workspace = workspace_of(2, max(contexts), case, device, chunk=16)
    out = attend(query, pages, contexts, case, scale=0.25, workspace=workspace)
    assert workspace.items[: workspace.num_items.item(), 4].unique().tolist() == [16, 32]
    assert_near(out, expected_of(query, *pages, contexts, scale=0.25), case[0])


def pieces_of(contexts: list[int], window: int | None, chunk: int, round_size: int) -> list[list[int]]:
    """The pieces into which `plan_decode` must cut these rows, for heads of 16 numbers."""
    chunks, most_runs = cuts_of(16)
    rows = []
    for row, context in enumerate(contexts):
        start, size = 0 if window is None else max(0, context - window), chunk
        while -(-context // (size * chunks)) - start // (size * chunks) > most_runs:
            size *= 2
        spans = [(max(start, at), min(at + size, context)) for at in range(start // size * size, context, size)]
        runs: dict[int, list[tuple[int, int]]] = {}
        for span in spans:
            runs.setdefault(span[0] // (size * chunks), []).append(span)
        rows += [(row, size, run) for run in runs.values()]
    whole = len(rows) // round_size * round_size
    pieces: list[list[int]] = []
    for number, (row, size, run) in enumerate(rows):
        parts = [(run[0][0], run[-1][1])] if number < whole else run
        of_row = sum(piece[0] == row for piece in pieces)
        for i, (first, end) in enumerate(parts):
            pieces.append([row, first, end, of_row + i, size, i == len(parts) - 1])
    for piece in pieces:
        piece[3] += sum(other[0] == piece[0] for other in pieces) << 16
    return pieces


@pytest.mark.parametrize("num_programs", [1, 40, 3000])
@pytest.mark.parametrize("window", [None, 1, 300, 40_000])
def test_plan_decode_cuts_rows_into_pieces(window, num_programs, device):
    """40 programs: complete rounds take runs, and the last one takes chunks."""
    chunks, most_runs = cuts_of(16)
    edge = most_runs * chunks * CHUNK
    contexts = [0, 1, 63, 64, 65, 256, 257, 300, 5000, 0, edge, edge + 1, 2 * edge + 1, 131_072, 7]
    workspace = workspace_decode(
        rows=20, max_context=131_072, heads=2, kv_heads=1, head_dim=16, window=window, num_programs=num_programs,
        device=device,
    )  # fmt: skip
    workspace.items.fill_(-1)
    plan_decode(torch.tensor(contexts, dtype=torch.int32, device=device), workspace)
    expected = pieces_of(contexts, window, CHUNK, num_programs)
    assert workspace.num_items.item() == len(expected) <= len(workspace.items)
    assert workspace.items[: len(expected)].tolist() == expected
    assert (workspace.items[len(expected) :] == -1).all()


def test_rows_without_keys_have_no_pieces(device):
    workspace = workspace_of(4, 100, CASES[0], device)
    plan_decode(torch.zeros(4, dtype=torch.int32, device=device), workspace)
    assert workspace.num_items.item() == 0


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "num_programs", "limit"),
    [(32, 8, 128, 396, 300 << 20), (16, 1, 512, 132, 140 << 20), (128, 1, 512, 132, 600 << 20)],
)
def test_partial_results_take_little_memory(heads, kv_heads, head_dim, num_programs, limit):
    """Of 256 rows of 32k positions: Llama-3.1-8B, and latent attention with 16 and 128 heads."""
    workspace = workspace_decode(
        rows=256, max_context=32768, heads=heads, kv_heads=kv_heads, head_dim=head_dim, num_programs=num_programs,
        device="meta",
    )  # fmt: skip
    assert workspace.nbytes <= limit, workspace.nbytes
