"""The C scans against the reference, and their bits against those of other steps over the same tokens."""

import random

import pytest
import torch
from mixer_cases import CASES
from state_pages import StatePages, on

from pagewire.kernels import reference_scans
from pagewire.kernels.cpu.scans import NativeScans
from pagewire.kernels.states import StateRows


def assert_close(found, expected):
    """Sums of numbers of both signs have errors in proportion to the numbers, not to the sum."""
    most = expected.abs().max().item() if expected.numel() else 0.0
    torch.testing.assert_close(found, expected, atol=2e-6 * max(1.0, most), rtol=2e-5)


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


@pytest.fixture(params=CASES)
def case(request):
    return CASES[request.param]()


def pages_for(case, seed, k=None):
    """Pages whose tiles hold one or more units, with a random state in each."""
    chosen = random.Random(seed)
    per_tile = chosen.choice([1, 1, 2, case.units])
    tiles = -(-case.units // per_tile)
    pages = StatePages(case.units, case.unit_bytes, k=min(tiles, k or chosen.choice([1, 2, 3])), per_tile=per_tile)
    return pages


def fill(pages, case, *states):
    for state in states:
        pages.tiles.store(pages.memory, state, torch.randn(case.units, *case.unit_shape))


def states_of(case, pages, memory, at):
    return pages.tiles.load(memory, at, (case.units, *case.unit_shape))


@pytest.mark.parametrize("seed", range(2))
def test_a_step_equals_the_reference(level, case, seed):
    """Rows that begin, go on in place or from a snapshot, are kept in the midst, are not written, or have no tokens."""
    pages = pages_for(case, seed)
    old, snapshot, new, kept, moved = (pages.take() for _ in range(5))
    fill(pages, case, old, snapshot)
    counts = [1, 40, 0, 3, 1, 2]
    read = [old, pages.none, snapshot, snapshot, snapshot, pages.none]
    written = [old, new, moved, pages.none, pages.none, pages.take()]
    keeps = [(1, 17, kept), (3, 3, pages.take()), (1, 1, pages.take()), (1, 40, pages.take()), (3, 1, pages.none)]
    rows = StateRows.of(pages.memory.clone(), counts, read, written, keeps)
    x = torch.randn(sum(counts), case.width) * 2
    mine, theirs = pages.memory.clone(), pages.memory.clone()
    out = case.run(NativeScans(level), x, on(rows, mine), pages.tiles)
    expected = case.run(reference_scans, x, on(rows, theirs), pages.tiles)
    assert_close(out, expected)
    for at in [*written, *(pages for _, _, pages in keeps)]:
        assert_close(states_of(case, pages, mine, at), states_of(case, pages, theirs, at))
        if at[0] >= 0:  # all else is untouched
            for memory in (mine, theirs):
                fill_like = states_of(case, pages, pages.memory, at)
                pages.tiles.store(memory, at, fill_like)
    assert torch.equal(mine, pages.memory) and torch.equal(theirs, pages.memory)


def steps(case, scans, x, pages, cuts, companion):
    """The results and the last state of a sequence that is cut at `cuts`, each part in a step between other rows."""
    memory, results, read = pages.memory.clone(), [], pages.none
    at, other = pages.free[: pages.k], pages.free[pages.k : 2 * pages.k]
    for first, end in zip([0, *cuts], [*cuts, x.shape[0]], strict=True):
        place = end % 4 if companion.shape[0] else 0
        parts = companion[:place], x[first:end], companion
        rows = StateRows.of(
            memory, [len(part) for part in parts], [pages.none, read, pages.none], [pages.none, at, other]
        )
        results.append(case.run(scans, torch.cat(parts), rows, pages.tiles)[place : place + end - first])
        read = at
    return torch.cat(results), states_of(case, pages, memory, at)


def test_the_bits_do_not_depend_on_how_a_sequence_is_cut(level, case):
    chosen, scans, pages = random.Random(0), NativeScans(level), pages_for(case, 0)
    x, companion = torch.randn(67, case.width), torch.randn(9, case.width)
    whole, last = steps(case, scans, x, pages, [], companion[:0])
    for cuts in ([1, 2, 3], [66], sorted(chosen.sample(range(1, 67), 12)), list(range(1, 9))):
        parts, state = steps(case, scans, x, pages, cuts, companion)
        assert torch.equal(whole, parts) and torch.equal(last, state), f"cut at {cuts}"


def test_a_kept_state_is_that_of_a_sequence_which_ends_there(level, case):
    pages, scans, x = pages_for(case, 0, k=2), NativeScans(level), torch.randn(40, case.width)
    places = {count: pages.take() for count in (1, 15, 16, 17, 39, 40)}
    keeps = [(0, count, at) for count, at in places.items()]
    rows = StateRows.of(pages.memory, [40], [pages.none], [pages.none], keeps)
    whole = case.run(scans, x, rows, pages.tiles)
    for count, at in places.items():
        end = pages.take()
        case.run(scans, x[:count], StateRows.of(pages.memory, [count], [pages.none], [end]), pages.tiles)
        assert torch.equal(states_of(case, pages, pages.memory, at), states_of(case, pages, pages.memory, end))
        rest = StateRows.of(pages.memory, [40 - count], [at], [pages.none])  # a snapshot is read, and stays
        assert torch.equal(case.run(scans, x[count:], rest, pages.tiles), whole[count:])
        pages.free.extend(end)


def test_the_number_of_threads_changes_no_bits(level, case):
    pages, x = pages_for(case, 0), torch.randn(33, case.width)
    rows = StateRows.of(pages.memory, [32, 1], [pages.none] * 2, [pages.take(), pages.take()])
    outs, threads = [], torch.get_num_threads()
    try:
        for num in (1, 5):
            torch.set_num_threads(num)
            level.threads()
            outs.append((case.run(NativeScans(level), x, rows, pages.tiles), pages.memory.clone()))
    finally:
        torch.set_num_threads(threads)
        level.threads()
    assert torch.equal(outs[0][0], outs[1][0]) and torch.equal(outs[0][1], outs[1][1])


def test_long_sequences_do_not_drift(level):
    case = CASES["delta, large"]()
    pages, x = pages_for(case, 0), torch.randn(1000, case.width)
    rows = StateRows.of(pages.memory, [1000], [pages.none], [pages.none])
    out = case.run(NativeScans(level), x, rows, pages.tiles)
    expected = case.run(reference_scans, x, rows, pages.tiles)
    assert_close(out, expected)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_stays_in_its_row(level, case, value):
    pages, x = pages_for(case, 0), torch.randn(8, case.width)
    rows = StateRows.of(pages.memory, [3, 5], [pages.none] * 2, [pages.none] * 2)
    clean = case.run(NativeScans(level), x, rows, pages.tiles)
    x[1] = value
    out = case.run(NativeScans(level), x, rows, pages.tiles)
    assert torch.equal(out[0], clean[0]) and torch.equal(out[3:], clean[3:])
    assert not out[1].isfinite().any() and (value == value or out[1].isnan().all())


@pytest.mark.parametrize("gate_first", [False, True])
@pytest.mark.parametrize("act", ["silu", "sigmoid"])
@pytest.mark.parametrize(
    ("tokens", "width", "size", "weights"),
    [(1, 48, 48, 48), (7, 60, 20, 20), (5, 60, 20, 60), (300, 256, 128, 128), (4, 33, 11, None), (0, 16, 16, 16)],
)
def test_gated_norm(level, gate_first, act, tokens, width, size, weights):
    x, z = (torch.randn(tokens, 2 * width + 3) * 5)[:, : 2 * width].chunk(2, dim=1)
    weight = None if weights is None else torch.randn(weights)
    out = NativeScans(level).gated_norm(x, z, weight, size, 1e-5, act, gate_first)
    torch.testing.assert_close(
        out, reference_scans.gated_norm(x, z, weight, size, 1e-5, act, gate_first), atol=1e-5, rtol=1e-5
    )


def test_a_nan_in_any_input_is_seen_where_the_reference_has_one(level, case):
    pages, rng = pages_for(case, 0), random.Random(0)
    rows = StateRows.of(pages.memory, [3], [pages.none], [pages.none])
    for column in [*rng.sample(range(case.width), 5), *range(case.width - 12, case.width, 2)]:
        x = torch.randn(3, case.width)
        x[1, column] = float("nan")
        out = case.run(NativeScans(level), x, rows, pages.tiles)
        expected = case.run(reference_scans, x, rows, pages.tiles)
        assert torch.equal(out.isnan(), expected.isnan()), f"column {column}"
