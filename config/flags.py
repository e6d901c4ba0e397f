"""`Config` as command-line flags and back. The struct is the only place where a flag is written down."""

import argparse
import difflib
import os
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, get_args, get_origin, get_type_hints

import msgspec

from ..errors import ConfigError
from .config import Config, parse_size

_SIZES = {
    "kv_cache_memory",
    "max_model_len",
    "max_num_batched_tokens",
    "max_queued_tokens",
    "max_body_size",
    "max_head_size",
}  # may be written 2G, 8k


_GROUPS = ("model", "engine", "door", "server", "access", "limits")


def add_flags(parser: argparse.ArgumentParser, *, groups: Sequence[str] = _GROUPS) -> None:
    """Adds the positional MODEL and a flag for every other field of the named groups of `Config`."""
    hints = get_type_hints(Config, include_extras=True)
    sections: dict[str, argparse._ArgumentGroup] = {}
    for field in msgspec.structs.fields(Config):
        kind, meta = get_args(hints[field.name])[0], get_args(hints[field.name])[1]
        group = meta.extra["group"]
        if group not in groups:
            continue
        section = sections.setdefault(group, parser.add_argument_group(group))
        text = f"{meta.description}{_default(field.default)}"
        if field.name == "model":
            section.add_argument("model", metavar="MODEL", nargs="?", help=meta.description)
            continue
        flag = _flag(field.name)
        if kind is bool:
            section.add_argument(flag, action=argparse.BooleanOptionalAction, default=None, help=text)
        elif choices := _choices(kind):
            section.add_argument(flag, choices=choices, default=None, help=text)
        elif get_origin(kind) is tuple:
            section.add_argument(flag, nargs="+", default=None, metavar="NAME", help=text)
        else:
            section.add_argument(flag, default=None, metavar=_metavar(flag, kind), help=text)
    parser.add_argument(
        "--config", metavar="FILE", help="a TOML file of these settings, such as max_num_seqs = 64; flags go before it"
    )


def read_flags(namespace: argparse.Namespace) -> Config:
    """The Config of parsed flags and of the file that they name; what is in neither keeps its default. Raises
    ConfigError."""
    return read_settings(namespace)[0]


def read_settings(namespace: argparse.Namespace) -> tuple[Config, dict[str, str]]:
    """See `read_flags`; and where each field was set that was: its flag, the file, or PAGEWIRE_API_KEY."""
    file: str | None = getattr(namespace, "config", None)
    values = {} if file is None else _read_file(Path(file))
    said = dict.fromkeys(values, str(file))
    for name in Config.__struct_fields__:
        value = getattr(namespace, name, None)
        if value is not None:
            values[name] = value
            said[name] = _flag(name)
    if not values.keys() & {"api_key", "api_key_file"} and os.environ.get("PAGEWIRE_API_KEY"):
        values["api_key"] = [os.environ["PAGEWIRE_API_KEY"]]
        said["api_key"] = "PAGEWIRE_API_KEY"
    for name in _SIZES & values.keys():
        if isinstance(text := values[name], str):
            values[name] = parse_size(text)
    try:
        return msgspec.convert(values, Config, strict=False), said
    except msgspec.ValidationError as error:
        what, _, where = str(error).partition(" - at `$.")
        name = where.rstrip("`").partition("[")[0]
        place = f"{said[name]}: {name}" if said[name] == file else _flag(name)
        raise ConfigError(f"{place}: {what[0].lower()}{what[1:]}.".replace("`", "")) from error


def _read_file(path: Path) -> dict[str, object]:
    """Settings by field name; max-num-seqs may be written for max_num_seqs. Raises ConfigError."""
    try:
        found = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"--config {path} cannot be read: {error.strerror}.") from error
    except ValueError as error:  # no TOML, or no UTF-8
        raise ConfigError(f"--config {path} is no valid TOML: {error}.") from error
    settings = {name.replace("-", "_"): value for name, value in found.items()}
    for field in msgspec.structs.fields(Config):
        if isinstance(field.default, tuple) and isinstance(one := settings.get(field.name), str):
            settings[field.name] = [one]
    for name in settings.keys() - set(Config.__struct_fields__):
        near = difflib.get_close_matches(name, Config.__struct_fields__, n=1)
        raise ConfigError(f"--config {path}: there is no setting {name}{f'; is it {near[0]}?' if near else '.'}")
    return settings


def _flag(name: str) -> str:
    return "MODEL" if name == "model" else "--" + name.replace("_", "-")


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
    if "float" in text:
        return "MS" if flag.endswith("-ms") else "SHARE" if flag.endswith("-utilization") else "SECONDS"
    return "N" if "int" in text else "TEXT"
