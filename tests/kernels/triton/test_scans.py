"""The scans of Triton against the reference, by steps and in chunks."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from mixer_cases import CASES
from state_pages import StatePages, on

from pagewire.kernels import reference_scans
from pagewire.kernels.states import StateRows
from pagewire.kernels.triton import scans
from pagewire.kernels.triton.scans import StateTable, fill_states, states_size

NAMES = [name for name in CASES if "many" not in name] if not torch.cuda.is_available() else list(CASES)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PADDING = 2  # rows that a launch has and its table has not


def device_scans(is_long):
    """The scans of Triton, with the arguments of the reference, which may lie on the host."""

    def padded(rows):
        table = StateTable.of(rows, is_long=is_long)
        return replace(table, num_rows=table.num_rows + PADDING)

    def moved(arg):
        return arg.to(DEVICE) if isinstance(arg, torch.Tensor) else arg

    def taking_rows(scan):
        def run(*args):
            (rows,) = [arg for arg in args if isinstance(arg, StateRows)]
            there = on(rows, rows.memory.to(DEVICE))
            out = scan(*(padded(there) if arg is rows else moved(arg) for arg in args)).cpu()
            rows.memory.copy_(there.memory)
            return out

        return run

    names = ("conv", "scan_mamba1", "scan_delta", "scan_mamba2", "scan_lightning")
    return SimpleNamespace(**{name: taking_rows(getattr(scans, name)) for name in names})


def assert_close(found, expected, tolerance=2e-5):
    most = expected.abs().max().item() if expected.numel() else 0.0
    torch.testing.assert_close(found, expected, atol=tolerance * max(1.0, most), rtol=tolerance)


@pytest.mark.parametrize("tool", ["steps", "chunks"])
@pytest.mark.parametrize("name", NAMES)
def test_a_step_equals_the_reference(name, tool):
    """Rows that begin, go on in place or from a snapshot, are kept in the midst, are not written, or have no tokens."""
    case = CASES[name]()
    pages = StatePages(case.units, case.unit_bytes, k=min(2, case.units), per_tile=1)
    old, snapshot, new, kept, moved = (pages.take() for _ in range(5))
    for state in (old, snapshot):
        pages.tiles.store(pages.memory, state, torch.randn(case.units, *case.unit_shape))
    counts = [1, 70 if tool == "chunks" else 20, 0, 3, 1, 2]
    read = [old, pages.none, snapshot, snapshot, snapshot, pages.none]
    written = [old, new, moved, pages.none, pages.none, pages.take()]
    keeps = [(1, 17, kept), (3, 3, pages.take()), (1, 1, pages.take()), (1, counts[1], pages.take())]
    rows = StateRows.of(pages.memory, counts, read, written, keeps)
    x = torch.randn(sum(counts), case.width) * 2
    mine, theirs = pages.memory.clone(), pages.memory.clone()
    out = case.run(device_scans(is_long=tool == "chunks"), x.to(DEVICE), on(rows, mine), pages.tiles)
    expected = case.run(reference_scans, x, on(rows, theirs), pages.tiles)
    assert_close(out, expected)
    for at in [*(pages for pages in written if pages[0] >= 0), *(pages for _, _, pages in keeps)]:
        states = [pages.tiles.load(memory, at, (case.units, *case.unit_shape)) for memory in (mine, theirs)]
        assert_close(*states)
        for memory in (mine, theirs):  # all else is untouched
            before = pages.tiles.load(pages.memory, at, (case.units, *case.unit_shape))
            pages.tiles.store(memory, at, before)
    assert torch.equal(mine, pages.memory) and torch.equal(theirs, pages.memory)


def test_a_program_of_the_first_pass_takes_several_chunks_if_there_are_many():
    """Rows that keep their states often have more chunks than the launch has programs."""
    case = CASES["delta, odd sizes"]()
    pages = StatePages(case.units, case.unit_bytes)
    keeps = [(0, count, pages.take()) for count in range(1, 20)]
    rows = StateRows.of(pages.memory, [20], [pages.none], [pages.take()], keeps)
    assert StateTable.of(rows, is_long=True).place[scans._HEADER + 3] == 20 > 1 + PADDING + 20 // scans.CHUNK
    x = torch.randn(20, case.width)
    mine, theirs = pages.memory.clone(), pages.memory.clone()
    out = case.run(device_scans(is_long=True), x.to(DEVICE), on(rows, mine), pages.tiles)
    assert_close(out, case.run(reference_scans, x, on(rows, theirs), pages.tiles))
    for _, _, at in keeps:
        assert_close(*(pages.tiles.load(memory, at, (case.units, *case.unit_shape)) for memory in (mine, theirs)))


def expected_table(rows):
    """(first chunk and pages read of each row, tokens and pages written of each chunk)."""
    firsts, chunks = [], []
    for segment in rows.segments():
        if segment.read is not None:
            firsts.append((len(chunks), segment.read))
        begin = segment.first
        while segment.end - begin > scans.CHUNK:
            chunks.append((begin, begin + scans.CHUNK, None))
            begin += scans.CHUNK
        chunks.append((begin, segment.end, segment.written))
    return firsts, chunks


@pytest.mark.parametrize("seed", range(4))
def test_a_table_describes_the_rows(seed):
    random = np.random.default_rng(seed)
    num, k = int(random.integers(0, 7)), int(random.integers(1, 4))
    counts = [int(random.choice([0, 1, 2, 16, 17, 33, 70])) for _ in range(num)]

    def state():
        return random.integers(0, 99, k).tolist()

    written = [state() if random.random() < 0.8 else [-1] * k for _ in range(num)]
    read = [random.choice([0, 1, 2]) for _ in range(num)]
    read = [[written[row], [-1] * k, state()][kind] for row, kind in enumerate(read)]
    keeps = [
        (row, int(count), state())
        for row in range(num)
        for count in random.permutation(np.arange(1, counts[row] + 1))[: random.integers(0, 4)]
    ]
    rows = StateRows.of(torch.zeros(1, 64, dtype=torch.uint8), counts, read, written, keeps)
    table = np.full(states_size(rows=num, tokens=sum(counts), pages=k), 7777, np.int32)
    length = fill_states(table, rows)
    assert length <= len(table) and (table[length:] == 7777).all()

    num_rows, chunks_at, pages_at, num_chunks = table[:4].tolist()
    records = table[4:chunks_at].reshape(-1, 2).tolist()
    chunks = table[chunks_at:pages_at].reshape(-1, 3).tolist()
    pages = [*table[pages_at:length].reshape(-1, k).tolist(), [-1] * k]  # state -1 is the last
    expected_rows, expected_chunks = expected_table(rows)
    assert (num_rows, num_chunks) == (num, len(chunks)) and records[-1] == [len(chunks), -1]
    assert [(first, pages[state]) for first, state in records[:-1]] == expected_rows
    found = [(first, end, None if state < 0 else pages[state]) for first, end, state in chunks]
    assert found == expected_chunks
