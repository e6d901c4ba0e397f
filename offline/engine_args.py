"""`EngineArgs`: the settings of an engine by keyword, pagewire's own and vLLM's."""

import argparse
import contextlib
import json
import logging
from collections.abc import Mapping
from typing import Any, Self

from ..config.config import Config, EngineConfig
from ..config.flags import from_options
from ..config.foreign_flags import Flag, find, translate_options
from ..config.vllm_flags import FLAGS
from ..errors import ConfigError
from ..procs.prepare import prepare

log = logging.getLogger("pagewire.offline")


class EngineArgs:
    """What an engine is made of. Settings have pagewire's names or vLLM's (docs/from-vllm.md)."""

    caller = "EngineArgs"  # for messages

    def __init__(self, model: str = "", *, tokenizer: Any = None, seed: Any = None, **options: object):
        """`model`: a folder or a Hub name; empty: the demo model. `tokenizer`: must be the model's. `seed`: requests
        without a seed get the same seeds in each run; None: random ones."""
        self.model = model
        self.tokenizer: str | None = tokenizer
        self.seed: int | None = seed
        self.options = options

    def settings(self) -> dict[str, object]:
        """pagewire's settings by name; logs a sentence for each argument without effect. Raises ConfigError."""
        if self.tokenizer not in (None, self.model):
            raise ConfigError(f"{self.caller}: tokenizer: the tokenizer in the model's folder is used; leave it out.")
        found, notes = translate_options(self.options, find(FLAGS))
        for note in notes:
            log.warning("%s: %s", self.caller, note)
        return {**found, "model": self.model}

    def config(self, defaults: Mapping[str, object] | None = None) -> Config:
        """`defaults`: of settings that are not given. Raises ConfigError."""
        return from_options(self.caller, {**(defaults or {}), **self.settings()})

    def prepare(self, defaults: Mapping[str, object] | None = None) -> EngineConfig:
        """The configuration of the engine; a Hub model is downloaded. Raises ConfigError, CheckpointError."""
        return prepare(self.config(defaults))

    @classmethod
    def add_cli_args(cls, parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        """Adds vLLM's flags to a parser, for `from_cli_args`."""
        for flag in FLAGS:
            names = [*flag.names]
            if flag.name == "--config" or any(name in parser._option_string_actions for name in names):
                continue
            if flag.kind == "":
                parser.add_argument(*names, action=argparse.BooleanOptionalAction, default=None)
            else:
                nargs = {"=+": "+", "=?": "?"}.get(flag.kind)
                parser.add_argument(*names, nargs=nargs, default=None)
        return parser

    @classmethod
    def from_cli_args(cls, args: argparse.Namespace) -> Self:
        """The settings of parsed flags."""
        known = {flag.name.removeprefix("--").replace("-", "_"): flag for flag in FLAGS}
        given = {name: value for name, value in vars(args).items() if name in known and value is not None}
        return cls(**{name: _value(known[name], value) for name, value in given.items()})


def _value(flag: Flag, value: Any) -> Any:
    """The number or object of a flag's text. Raises ConfigError."""
    if not isinstance(value, str):
        return value
    if flag.kind == "={}":
        try:
            return json.loads(value)
        except ValueError as error:
            raise ConfigError(f"{flag.name} needs JSON, not {value[:80]!r}.") from error
    for kind in (int, float):
        with contextlib.suppress(ValueError):
            return kind(value)
    return value


class AsyncEngineArgs(EngineArgs):
    """`EngineArgs` under the name that vLLM has for `AsyncLLMEngine`."""

    caller = "AsyncEngineArgs"
