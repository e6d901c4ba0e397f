"""Classes that are named on the command line."""

import sys
from pathlib import Path

import pytest

from pagewire.config.plugins import check_module, find_class, split_spec
from pagewire.errors import ConfigError


def test_a_spec_is_a_name_with_options() -> None:
    assert split_spec("--flag", "module:Class") == ("module:Class", {})
    assert split_spec("--flag", "disk,path=/a=b,size=4G") == ("disk", {"path": "/a=b", "size": "4G"})


@pytest.mark.parametrize("spec", ["name,", "name,x", "name,=1", "name,a=1,a=2"])
def test_invalid_options_are_refused(spec: str) -> None:
    with pytest.raises(ConfigError, match="is not an option=value"):
        split_spec("--flag", spec)


def test_a_class_is_found_by_its_name_and_methods() -> None:
    assert find_class("--flag", "pathlib:Path", ["exists"]) is Path


@pytest.mark.parametrize(
    ("target", "sentence"),
    [
        ("pathlib", "write module:Class"),
        (":Path", "write module:Class"),
        ("no_such_module:Class", r"no_such_module cannot be imported \(ModuleNotFoundError"),
        ("pathlib:Nothing", "pathlib has no class Nothing with exists"),
        ("pathlib:PurePath", "pathlib has no class PurePath with exists"),
        ("breaks:Class", r"breaks cannot be imported \(ValueError: at once\)"),
    ],
)
def test_a_missing_class_is_refused(
    target: str, sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "breaks.py").write_text("raise ValueError('at once')")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ConfigError, match=sentence):
        find_class("--flag", target, ["exists"])
    assert "breaks" not in sys.modules


def test_a_module_is_looked_for_and_not_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "breaks.py").write_text("raise ValueError('at once')")
    monkeypatch.syspath_prepend(str(tmp_path))
    check_module("--flag", "breaks:Class,a=1")
    assert "breaks" not in sys.modules


@pytest.mark.parametrize(
    ("spec", "sentence"),
    [
        ("module", "write module:Class"),
        ("module:", "write module:Class"),
        (":Class", "write module:Class"),
        ("json:Class,a", "'a' is not an option=value"),
        ("no_such_module:Class", "there is no module no_such_module"),
        ("no_such.module:Class", r"there is no module no_such\.module"),
        ("json.decoder.inner:Class", r"there is no module json\.decoder\.inner"),
    ],
)
def test_a_missing_module_is_refused(spec: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        check_module("--flag", spec)
