"""Modules that the command line names are looked for without being imported."""

import sys
from pathlib import Path

import pytest

from pagewire.config.plugins import check_module, find_class
from pagewire.errors import ConfigError


def test_a_module_is_found_and_not_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken_module.py").write_text("raise ZeroDivisionError")
    monkeypatch.syspath_prepend(str(tmp_path))
    check_module("--flag", "broken_module:Class,a=1")
    assert "broken_module" not in sys.modules
    with pytest.raises(ConfigError, match=r"--flag broken_module:Class: broken_module cannot be imported \(Zero"):
        find_class("--flag", "broken_module:Class", ())


@pytest.mark.parametrize(
    ("spec", "sentence"),
    [
        ("module", "write module:Class"),
        ("module:", "write module:Class"),
        (":Class", "write module:Class"),
        ("json:Class,a", "'a' is not an option=value"),
        ("no_such_module:Class", "there is no module no_such_module"),
        ("no_such.module:Class", "there is no module no_such.module"),
        ("json.decoder.inner:Class", "there is no module json.decoder.inner"),
    ],
)
def test_what_is_not_there_is_refused(spec: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        check_module("--flag", spec)
