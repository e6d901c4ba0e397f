"""The settings that an administrator's request may change."""

import pytest

from pagewire.config.config import Config
from pagewire.config.flags import make_config
from pagewire.errors import ConfigError
from pagewire.procs.generations import changed


def test_given_settings_are_changed_and_others_kept() -> None:
    config = changed(make_config(port=1, tool_call_parser="my:FAMILY"), {"model": "other", "reasoning_parser": "qwen3"})
    assert config == make_config(port=1, model="other", tool_call_parser="my:FAMILY", reasoning_parser="qwen3")
    with pytest.raises(ConfigError, match="port cannot be changed while serving"):
        changed(config, {"port": 2})


@pytest.mark.parametrize("name", ["tool_call_parser", "reasoning_parser"])
def test_a_request_cannot_make_the_server_import_a_module(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} must be the name of a family here"):
        changed(Config(), {name: "os:path"})
