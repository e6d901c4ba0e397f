"""What an operator says of a Ray Serve application, and what each part of it is given. No Ray."""

import pytest

from pagewire.config.flags import SETTINGS
from pagewire.errors import ConfigError
from pagewire.ray.serving import ServeOptions, split


def test_options_and_settings_have_different_names() -> None:
    assert not set(ServeOptions.__struct_fields__) & SETTINGS.keys()


def test_values_may_be_text_as_serve_run_gives_them() -> None:
    options, settings, config = split({"model": "m", "max-num-seqs": "8", "max_replicas": "3", "kv_cache_memory": "2G"})
    assert options == ServeOptions(max_replicas=3)
    assert settings == {"model": "m", "max_num_seqs": "8", "kv_cache_memory": "2G"}
    assert config.engine.max_num_seqs == 8


def test_several_values_are_a_list_or_have_commas() -> None:
    for models in ("a,b", ["a", "b"]):
        assert split({"models": models})[2].source.models == ("a", "b")


@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        ({"min_replicas": 0}, "min_replicas: expected `?int`? >= 1"),
        ({"min_replicas": 3, "max_replicas": 2}, "max_replicas 2 is less than min_replicas 3."),
        ({"replicas": 3}, "replicas is no setting of pagewire serve"),
        ({"port": 8000}, "port is not for an engine of a Ray Serve application"),
        ({"max_num_seqs": "many"}, "max_num_seqs"),
    ],
)
def test_wrong_settings_are_one_sentence(args: dict[str, object], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        split(args)
