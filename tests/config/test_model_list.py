"""Several models: their list from arguments, folders and files, and what is refused."""

import math
from pathlib import Path

import pytest

from pagewire.config.flags import add_flags, make_config, read_flags
from pagewire.config.model_list import parse_keep_alive, read_models
from pagewire.errors import ConfigError


def listed(*models: str, **settings: object) -> list[str]:
    return [entry.config.source.model for entry in read_models(make_config(models=models, **settings))]


def test_several_arguments_are_several_models() -> None:
    import argparse

    parser = argparse.ArgumentParser()
    add_flags(parser)

    def read(*argv: str) -> tuple[str, tuple[str, ...]]:
        source = read_flags(parser.parse_args(argv)).source
        return source.model, source.models

    assert read() == ("", ()) and read("a", "--port", "1") == ("a", ()) and read("--port", "1", "a") == ("a", ())
    assert read("a", "b") == ("", ("a", "b")) and read("--models", "a") == ("", ("a",))
    assert read("a", "--models", "b", "c") == ("", ("a", "b", "c"))


def test_a_folder_has_its_models_and_other_settings_are_for_all(tmp_path: Path) -> None:
    for name in ("b", "a"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
    (tmp_path / "c.gguf").touch()
    (tmp_path / "empty").mkdir()
    assert listed(str(tmp_path)) == [str(tmp_path / name) for name in ("a", "b", "c.gguf")]
    assert listed(str(tmp_path / "a"), "org/name") == [str(tmp_path / "a"), "org/name"]
    first, _ = read_models(make_config(models=("x", "y"), max_num_seqs=7))
    assert first.config.engine.max_num_seqs == 7 and not first.config.source.models
    assert not first.is_pinned and first.keep_alive_s == math.inf
    with pytest.raises(ConfigError, match=r"none of its folders has a config\.json"):
        listed(str(tmp_path / "empty"))
    with pytest.raises(ConfigError, match="--served-model-name is for one model"):
        listed("a", "b", served_model_name=("x",))


def test_a_file_says_how_each_model_is_served(tmp_path: Path) -> None:
    (tmp_path / "own").mkdir()
    file = tmp_path / "models.toml"
    file.write_text(
        '[[models]]\nmodel = "own"\nserved-model-name = "small"\npinned = true\nsystem_prompt = "Be kind."\n'
        'override_generation_config = {temperature = 0.1}\nkv_cache_memory = "1G"\n'
        '[[models]]\nmodel = "org/name"\nserved_model_name = ["x", "y"]\nkeep_alive = "5m"\n'
    )
    small, other = read_models(make_config(models=(str(file),), max_model_len=64))
    assert small.config.source.model == str(tmp_path / "own") and small.config.source.served_model_name == ("small",)
    assert small.is_pinned and small.system_prompt == "Be kind." and small.config.engine.kv_cache_memory == 1 << 30
    assert small.config.engine.override_generation_config == {"temperature": 0.1}
    assert other.config.source.model == "org/name" and other.keep_alive_s == 300.0 and not other.is_pinned
    assert other.config.engine.max_model_len == 64 and other.config.engine.kv_cache_memory is None


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "must have a [[models]] table"),
        ("x = 1", "must have a [[models]] table"),
        ("[[models]", "is no valid TOML"),
        ("[[models]]\npinned = true", "model 1: model is missing"),
        ('[[models]]\nmodel = "a"\n[[models]]\nmodel = "b"\nport = 1', "model 2: port is no setting of a model"),
        ('[[models]]\nmodel = "a"\npinned = "yes"', "pinned must be true or false"),
        ('[[models]]\nmodel = "a"\nkeep_alive = "soon"', "keep_alive must be seconds"),
        ('[[models]]\nmodel = "a"\nsystem_prompt = 1', "system_prompt must be a text"),
        ('[[models]]\nmodel = "a"\nmax_num_seqs = "x"', "max_num_seqs"),
        ('[[models]]\nmodel = "a"\nx = 1\n[[models]]\nmodel = "b"\ny = 1', "model 1: x is no setting of a model. "),
    ],
)
def test_a_bad_entry_is_named_in_a_sentence(tmp_path: Path, text: str, words: str) -> None:
    file = tmp_path / "models.toml"
    file.write_text(text)
    with pytest.raises(ConfigError) as raised:
        listed(str(file))
    assert words in str(raised.value) and str(raised.value).endswith(".")


def test_a_file_must_be_there() -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        listed("nowhere.toml")


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        *((0, 0.0), (1.5, 1.5), ("30", 30.0), ("5m", 300.0), ("1h30m", 5400.0), ("500ms", 0.5), ("2h", 7200.0)),
        *((-1, math.inf), ("-1", math.inf), ("-1m", math.inf)),
    ],
)
def test_keep_alive_is_seconds_or_a_time(value: object, seconds: float) -> None:
    assert parse_keep_alive(value) == seconds


@pytest.mark.parametrize("value", ["", "m", "5x", "x5", "5m3", "1.2.3", None, True, [], "nan", float("nan")])
def test_keep_alive_is_nothing_else(value: object) -> None:
    with pytest.raises(ValueError):
        parse_keep_alive(value)
