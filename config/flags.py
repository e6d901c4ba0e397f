"""`Config` from flags, files and keyword arguments. Its sections are the only place where a setting is written down."""

import argparse
import difflib
import json
import os
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal, NamedTuple, get_args, get_origin, get_type_hints

import msgspec

from ..errors import ConfigError
from .config import Config, Live, parse_size

_SIZES = frozenset(  # settings that may be written 2G or 8k
    {"kv_cache_memory", "max_model_len", "max_num_batched_tokens", "max_queued_tokens"}
    | {"max_body_size", "max_head_size", "models_memory"}
)
_OBJECTS = frozenset(
    {"default_chat_template_kwargs", "latency_classes", "override_generation_config"}
)  # may be written as JSON
_GROUPS = ("model", "engine", "network", "server", "access", "limits")


class Setting(NamedTuple):
    """One field of a section of `Config`, and so one flag."""

    name: str
    section: str  # the field of `Config` that holds it
    group: str  # of the help
    kind: object  # its type
    default: object
    help: str
    live: Live | None  # how it may change while the server runs; None: it needs a restart

    @property
    def flag(self) -> str:
        return "MODEL" if self.name == "model" else "--" + self.name.replace("_", "-")


def _settings() -> dict[str, Setting]:
    found = {}
    for section, struct in get_type_hints(Config).items():
        hints = get_type_hints(struct, include_extras=True)
        for field in msgspec.structs.fields(struct):
            kind, meta = get_args(hints[field.name])[:2]
            assert field.name not in found, f"two settings are called {field.name}"
            group, live = meta.extra["group"], meta.extra["live"]
            found[field.name] = Setting(field.name, section, group, kind, field.default, meta.description, live)
    return found


SETTINGS = _settings()
"""Every setting by its name, in the order of the help."""


def get_setting(config: Config, name: str) -> object:
    value: object = getattr(getattr(config, SETTINGS[name].section), name)
    return value


def convert(settings: Mapping[str, object], *, strict: bool = True) -> Config:
    """The Config of settings by name; a size may be text such as "2G". Raises ConfigError for a wrong size, and
    msgspec.ValidationError, whose path is `$.section.name`, for every other wrong value."""
    sections: dict[str, dict[str, object]] = {}
    for name, value in settings.items():
        if name not in SETTINGS:
            raise msgspec.ValidationError(f"Object contains unknown field `{name}`")
        if name in _SIZES and isinstance(value, str):
            value = parse_size(value)
        elif name in _OBJECTS and isinstance(value, str):
            value = _parse_object(SETTINGS[name].flag, value)
        sections.setdefault(SETTINGS[name].section, {})[name] = value
    return msgspec.convert(sections, Config, strict=strict)


def _parse_object(flag: str, text: str) -> object:
    try:
        return json.loads(text)
    except ValueError as error:
        raise ConfigError(f'{flag}: {text[:80]!r} is no JSON object such as {{"name": 1}}.') from error


def from_options(
    caller: str, options: Mapping[str, object], *, base: Config | None = None, strict: bool = True
) -> Config:
    """The Config of Python callers' keyword arguments. A setting that is not given is as in `base`, or has its default.
    `strict`: numbers are no text. Raises ConfigError."""
    values: dict[str, object] = {} if base is None else {name: get_setting(base, name) for name in SETTINGS}
    try:
        return convert({**values, **options}, strict=strict)
    except msgspec.ValidationError as error:
        what, at, path = str(error).partition(" - at `$.")
        raise ConfigError(f"{caller}: {what}{at}{path.partition('.')[2]}.") from error


def make_config(**settings: object) -> Config:
    """`from_options`, for keyword arguments of tests and benchmarks."""
    return from_options("Config", settings)


def add_flags(parser: argparse.ArgumentParser, *, groups: Sequence[str] = _GROUPS) -> None:
    """Adds the positional MODEL and a flag for every other setting of the named groups."""
    sections: dict[str, argparse._ArgumentGroup] = {}
    for setting in SETTINGS.values():
        if setting.group not in groups:
            continue
        if setting.group not in sections:
            sections[setting.group] = parser.add_argument_group(setting.group)
        section, kind = sections[setting.group], setting.kind
        text = f"{setting.help}{_default(setting.default)}"
        if setting.name == "model":
            section.add_argument("model", metavar="MODEL", nargs="*", help=setting.help)
        elif kind is bool:
            section.add_argument(setting.flag, action=argparse.BooleanOptionalAction, default=None, help=text)
        elif choices := _choices(kind):
            section.add_argument(setting.flag, choices=choices, default=None, help=text)
        elif get_origin(kind) is tuple:
            section.add_argument(setting.flag, nargs="+", default=None, metavar="NAME", help=text)
        else:
            section.add_argument(setting.flag, default=None, metavar=_metavar(setting.flag, kind), help=text)
    parser.add_argument(
        "--config", metavar="FILE", help="a TOML file of these settings, such as max_num_seqs = 64; flags go before it"
    )


def read_flags(namespace: argparse.Namespace) -> Config:
    """The Config of parsed flags and of the file that they name; what is in neither keeps its default. Raises
    ConfigError."""
    return read_settings(namespace)[0]


def read_settings(namespace: argparse.Namespace) -> tuple[Config, dict[str, str]]:
    """The Config, as `read_flags`; and the source of each setting that was made: its flag, the file, or
    PAGEWIRE_API_KEY."""
    file: str | None = getattr(namespace, "config", None)
    values = {} if file is None else _read_file(Path(file))
    said = dict.fromkeys(values, str(file))
    for name, setting in SETTINGS.items():
        value = getattr(namespace, name, None)
        if name == "model" and isinstance(value, list):  # one is the model, and several are `models`
            namespace.models = [*value, *(namespace.models or ())] if len(value) > 1 or namespace.models else None
            value = None if namespace.models or not value else value[0]
        if value is not None:
            values[name] = value
            said[name] = setting.flag
    if not values.keys() & {"api_key", "api_key_file"} and os.environ.get("PAGEWIRE_API_KEY"):
        values["api_key"] = [os.environ["PAGEWIRE_API_KEY"]]
        said["api_key"] = "PAGEWIRE_API_KEY"
    try:
        return convert(values, strict=False), said
    except msgspec.ValidationError as error:
        what, _, path = str(error).partition(" - at `$.")
        name = path.rstrip("`").partition(".")[2].partition("[")[0]
        place = f"{said[name]}: {name}" if said[name] == file else SETTINGS[name].flag
        raise ConfigError(f"{place}: {what[0].lower()}{what[1:]}.".replace("`", "")) from error


def _read_file(path: Path) -> dict[str, object]:
    """Settings by field name; max-num-seqs may be written for max_num_seqs. Raises ConfigError."""
    settings = {name.replace("-", "_"): value for name, value in read_toml("--config", path).items()}
    for name, value in settings.items():
        if name not in SETTINGS:
            near = difflib.get_close_matches(name, SETTINGS, n=1)
            raise ConfigError(f"--config {path}: there is no setting {name}{f'; is it {near[0]}?' if near else '.'}")
        if isinstance(SETTINGS[name].default, tuple) and isinstance(value, str):
            settings[name] = [value]
    return settings


def read_toml(flag: str, path: Path) -> dict[str, object]:
    """The tables of a file that `flag` names. Raises ConfigError."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{flag} {path} cannot be read: {error.strerror}.") from error
    except ValueError as error:  # no TOML, or no UTF-8
        raise ConfigError(f"{flag} {path} is no valid TOML: {error}.") from error


def _default(default: object) -> str:
    if default is None or default == () or default == "":
        return ""
    if isinstance(default, float):
        return f" (default: {default:g})"
    return f" (default: {default})"


def _choices(kind: object) -> tuple[object, ...]:
    """Of a `Literal`, or of one that may be None."""
    kinds = [kind] if get_origin(kind) is Literal else [part for part in get_args(kind) if get_origin(part) is Literal]
    return tuple(choice for literal in kinds for choice in get_args(literal))


def _metavar(flag: str, kind: object) -> str:
    text = str(kind)
    if "dict" in text:
        return "JSON"
    if "float" in text:
        return "MS" if flag.endswith("-ms") else "SHARE" if flag.endswith("-utilization") else "SECONDS"
    return "N" if "int" in text else "TEXT"
