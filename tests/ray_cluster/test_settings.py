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
    assert settings == {"model": "m", "max_num_seqs": "8", "kv_cache_memory": "2G", "device": "cpu"}
    assert config.engine.max_num_seqs == 8


@pytest.mark.parametrize(
    ("args", "device"),
    [
        ({}, "cpu"),
        ({"tensor_parallel_size": 2}, "cpu"),
        ({"num_gpus": 0.5}, "cuda"),
        ({"num_gpus": "4", "tensor_parallel_size": "2", "pipeline_parallel_size": "2"}, "cuda"),
        ({"num_gpus": 2, "models": "a,b"}, "cuda"),
        ({"num_gpus": 2, "nnodes": 2, "tensor_parallel_size": 2, "backend": "ray", "key_file": "k"}, "cuda"),
    ],
)
def test_an_engine_computes_where_it_has_asked_for_room(args: dict[str, object], device: str) -> None:
    assert split(args)[2].engine.device == device


def test_several_values_are_a_list_or_have_commas() -> None:
    for models in ("a,b", ["a", "b"]):
        assert split({"models": models})[2].source.models == ("a", "b")


@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        ({"min_replicas": 0}, "min_replicas: expected `?int`? >= 1"),
        ({"min_replicas": 3, "max_replicas": 2}, "max_replicas 2 is less than min_replicas 3."),
        ({"replicas": 3}, "replicas is no setting of pagewire serve"),
        ({"port": 8000}, "port is not for an engine of a Ray Serve application: it listens at a free port"),
        ({"kv-events": "tcp://*:5557"}, "kv_events is not for an engine of a Ray Serve application: it names one"),
        ({"nnodes": 2}, "nnodes is for an engine on several nodes; leave it out, or give backend=ray"),
        ({"backend": "ray", "models": "a,b"}, "backend ray is for engines of one model"),
        ({"num_gpus": 1, "device": "cpu"}, "num_gpus 1 is for engines on GPUs"),
        ({"device": "cuda"}, "num_gpus 0 does not fit the 1 ranks of an engine"),
        ({"num_gpus": 1.5}, "num_gpus 1.5 does not fit the 1 ranks of an engine"),
        ({"num_gpus": 1, "tensor_parallel_size": "2"}, "num_gpus 1 does not fit the 2 ranks"),
        ({"num_gpus": 2, "tensor_parallel_size": 2, "pipeline_parallel_size": 2}, "2 times pipeline_parallel_size 2"),
        ({"num_gpus": 4, "tensor_parallel_size": 2, "backend": "ray"}, "give num_gpus=2"),
        ({"num_gpus": 1, "tensor_parallel_size": 2, "models": "a,b"}, "num_gpus 1 does not fit the 2 ranks"),
        ({"max_num_seqs": "many"}, "max_num_seqs"),
    ],
)
def test_wrong_settings_are_one_sentence(args: dict[str, object], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        split(args)
