"""Which classes are runner plugins."""

from pathlib import Path

import pytest

from pagewire.engine.plugin.registry import load_plugin
from pagewire.errors import ConfigError

SOURCE = """
from pagewire import RunnerPlugin
from pagewire.errors import ConfigError

class Good(RunnerPlugin):
    api_version = 1

    def __init__(self, options):
        if "wrong" in options:
            raise ConfigError("there is no option wrong.")
        self.options = options

class Unversioned(RunnerPlugin):
    pass

class Newer(RunnerPlugin):
    api_version = 2

class Sharing(RunnerPlugin):
    api_version = 1
    shared_kv = "some"

class Other:
    api_version = 1
"""


@pytest.fixture(autouse=True)
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "some_plugins.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(str(tmp_path))


def test_a_plugin_gets_its_options() -> None:
    assert vars(load_plugin("some_plugins:Good,a=1,b=x")) == {"options": {"a": "1", "b": "x"}}


@pytest.mark.parametrize(
    ("spec", "sentence"),
    [
        ("some_plugins", "--runner-plugin some_plugins: write module:Class"),
        ("some_plugins:Good,a", "'a' is not an option=value"),
        ("some_plugins:Good,wrong=1", "there is no option wrong."),
        ("some_plugins:Missing", "it must be a subclass of pagewire.RunnerPlugin"),
        ("some_plugins:Other", "it must be a subclass of pagewire.RunnerPlugin"),
        ("some_plugins:Unversioned", "set api_version = 1, the interface that this engine has"),
        ("some_plugins:Newer", "is for version 2 of the plugins' interface, and this engine has 1"),
        ("some_plugins:Sharing", "shared_kv must be all, equal args or none, not 'some'"),
        ("no_such_plugins:X", "no_such_plugins cannot be imported"),
    ],
)
def test_what_is_no_plugin_is_refused(spec: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        load_plugin(spec)
