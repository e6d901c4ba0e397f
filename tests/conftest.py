"""Makes the shared helpers importable (`import fakes`), limits busy waiting and downloads, and marks the tests of some
folders and files."""

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import kernel_levels
from defaults import COMPILED, machine
from waiting import SLOW_DISK_S

from pagewire.kernels.cpu.build import compiler

os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

# SIGINT is ignored in a background job of a shell, and children inherit that; tests send Ctrl-C to children.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Folder of tests/, or name of a file → the marker of all its tests. The markers are explained in pyproject.toml.
_MARKS_OF_FOLDERS = {
    "e2e": "e2e",
    "examples": "e2e",
    "stress": "e2e",
    "bench": "slow",
    "kernels/triton": "slow",
    "engine/gpu": "slow",
}
_MARKS_OF_NAMES = dict.fromkeys(
    (
        "test_exactness.py",
        "test_hybrids.py",
        "test_encoder_decoders.py",
        "test_quantized_exactness.py",
        "test_families.py",
        "test_pooling.py",
    ),
    "exactness",
)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    ran = (report for outcome in ("passed", "failed") for report in terminalreporter.stats.get(outcome, []))
    if line := kernel_levels.summary(ran):
        terminalreporter.write_line(line)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        path = item.path.relative_to(Path(__file__).parent)
        for folder, mark in _MARKS_OF_FOLDERS.items():
            if path.is_relative_to(folder):
                item.add_marker(mark)
        if path.name in _MARKS_OF_NAMES:
            item.add_marker(_MARKS_OF_NAMES[path.name])


@pytest.fixture
def writes_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tier of files that is closed writes all that waits, however slow the disk is: the test needs it next."""
    monkeypatch.setattr("pagewire.engine.kv_connector.file_worker._CLOSE_S", SLOW_DISK_S)


@pytest.fixture
def c_kernels() -> Iterator[None]:
    """Use the C kernels, whatever PAGEWIRE_MACHINE says of the machine."""
    if compiler() is None:
        pytest.skip("no C compiler")
    with machine(COMPILED):
        yield
