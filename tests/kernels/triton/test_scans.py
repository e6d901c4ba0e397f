"""The scans of Triton against the reference, by steps and in chunks."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch
from mixer_cases import CASES
from state_pages import StatePages, on

from pagewire.kernels import reference_scans
from pagewire.kernels.states import StateRows
from pagewire.kernels.triton import scans

NAMES = [name for name in CASES if "many" not in name] if not torch.cuda.is_available() else list(CASES)
BY_STEPS = SimpleNamespace(
    conv=scans.conv,
    scan_mamba1=scans.scan_mamba1,
    scan_delta=partial(scans.scan_delta, deterministic=True),
    scan_mamba2=partial(scans.scan_mamba2, deterministic=True),
    scan_lightning=partial(scans.scan_lightning, deterministic=True),
)


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
    out = case.run(BY_STEPS if tool == "steps" else scans, x, on(rows, mine), pages.tiles)
    expected = case.run(reference_scans, x, on(rows, theirs), pages.tiles)
    assert_close(out, expected)
    for at in [*(pages for pages in written if pages[0] >= 0), *(pages for _, _, pages in keeps)]:
        states = [pages.tiles.load(memory, at, (case.units, *case.unit_shape)) for memory in (mine, theirs)]
        assert_close(*states)
        for memory in (mine, theirs):  # all else is untouched
            before = pages.tiles.load(pages.memory, at, (case.units, *case.unit_shape))
            pages.tiles.store(memory, at, before)
    assert torch.equal(mine, pages.memory) and torch.equal(theirs, pages.memory)
