"""Flags of the command line, which follow from the fields of Config."""

import argparse
from typing import Any

import pytest

from pagewire.cli import build_parser
from pagewire.config.config import parse_size
from pagewire.config.flags import SETTINGS, add_flags
from pagewire.errors import ConfigError

from .test_config import parse


def test_flags_become_typed_values() -> None:
    config = parse(
        "m", "--max-model-len", "2k", "--kv-cache-memory", "1.5G", "--no-enable-prefix-caching", "--port", "0"
    )
    engine = config.engine
    assert config.source.model == "m" and engine.max_model_len == 2048 and engine.kv_cache_memory == 3 * 2**29
    assert config.listen.port == 0 and not engine.enable_prefix_caching
    assert parse("--served-model-name", "a", "b").source.served_model_name == ("a", "b")


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        (["--port", "70000"], "--port: expected int <= 65535."),
        (["--port", "eighty"], "--port: expected int, got str."),
        (["--max-num-seqs", "0"], "--max-num-seqs: expected int >= 1."),
        (["--kv-cache-memory", "much"], "'much' is not a number or a size such as 512M, 2G or 8k."),
        (["--drain-timeout", "-1"], "--drain-timeout: expected float >= 0.0."),
    ],
)
def test_an_invalid_flag_gives_one_sentence(argv: list[str], sentence: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse(*argv)
    assert str(error.value) == sentence


def test_every_flag_has_help() -> None:
    parser = argparse.ArgumentParser()
    add_flags(parser)
    text = parser.format_help()
    assert all(setting.flag in text for setting in SETTINGS.values())
    assert all(action.help for action in parser._actions)


def test_keys_may_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGEWIRE_API_KEY", "secret")
    assert parse().keys.api_key == ("secret",)
    assert parse("--api-key", "other").keys.api_key == ("other",)


@pytest.mark.parametrize(
    ("text", "size"), [("512", 512), ("8k", 8192), ("2G", 2**31), ("1.5 GiB", 3 * 2**29), ("3mb", 3 * 2**20)]
)
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "-1", "2X", "G", "1e9", "0x10"])
def test_invalid_sizes_are_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        parse_size(text)


def test_serve_has_at_most_99_flags() -> None:
    parser: Any = build_parser()
    serve = parser._subparsers._group_actions[0].choices["serve"]
    flags = {action.dest for action in serve._actions}
    assert flags >= SETTINGS.keys() and len(flags) <= 99
