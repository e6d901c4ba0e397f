"""The journal of a trial, left by processes that died, run, or were killed."""

import os
from pathlib import Path

import pytest

from pagewire.engine.steps.trial_journal import TrialJournal


def begun(folder: Path, pid: int, kernel: str, monkeypatch: pytest.MonkeyPatch) -> TrialJournal:
    """That of a process which tries this kernel."""
    with monkeypatch.context() as patch:
        patch.setattr(os, "getpid", lambda: pid)
        journal = TrialJournal(folder, "key")
        journal.begin("an earlier one")
        journal.begin(kernel)
    return journal


def die(journal: TrialJournal) -> None:
    """The system closes the files of a process that ends."""
    os.close(journal._fd)


def test_it_believes_two_deaths_or_one_that_is_certain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reader = TrialJournal(tmp_path, "key")
    die(begun(tmp_path, 1, "moe", monkeypatch))
    assert reader.crashed() == {}, "it may have been killed"
    die(begun(tmp_path, 2, "scans", monkeypatch))
    assert reader.crashed() == {}
    die(begun(tmp_path, 3, "moe", monkeypatch))
    assert reader.crashed() == {"moe": tmp_path / "trial-key-3"}
    assert TrialJournal(tmp_path, "other").crashed() == {}, "of another device or version"
    certain = begun(tmp_path, 4, "rms_norm", monkeypatch)
    certain.confirm()
    die(certain)
    assert reader.crashed().keys() == {"moe", "rms_norm"}


def test_a_process_that_runs_has_not_died(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    running = begun(tmp_path, 1, "moe", monkeypatch)
    running.confirm()
    assert TrialJournal(tmp_path, "key").crashed() == {}
    running.close()
    running.close()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("folder", [None, Path("/proc/nowhere")])
def test_without_a_folder_nothing_is_remembered(folder: Path | None) -> None:
    journal = TrialJournal(folder, "key")
    journal.begin("moe")
    journal.confirm()
    assert journal.crashed() == {}
    journal.close()
