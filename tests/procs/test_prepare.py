"""Configurations that are refused before any process starts and before anything is downloaded."""

import pytest

from pagewire.config.config import Config
from pagewire.config.flags import make_config
from pagewire.errors import ConfigError
from pagewire.procs.prepare import prepare


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        (make_config(kv_connector=("dsk,path=/x",)), "'dsk' is not known; there are disk, host, p2p, redis, shared"),
        (make_config(kv_connector=("host,size=much",)), "is not a number or a size"),
        (make_config(kv_connector=("p2p,peer=tcp://10.0.0.1:5",)), "give key-file=FILE"),
        (make_config(tensor_parallel_size=64), "attention heads cannot be divided evenly"),
        (make_config(extension="no_such_module:Extension"), "no_such_module cannot be imported"),
        (make_config(runner_plugin="no_such_module:Plugin"), "there is no module no_such_module; is its folder in"),
        (make_config(runner_plugin="no_such.module:Plugin"), "there is no module no_such.module"),
        (make_config(runner_plugin="json"), "--runner-plugin json: write module:Class"),
        (make_config(runner_plugin="json:Plugin,a"), "'a' is not an option=value"),
    ],
)
def test_invalid_connectors_extensions_and_plugins_are_refused(config: Config, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        prepare(config)
