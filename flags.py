"""`Config` as command-line flags and back. The struct is the only place where a flag is written down."""

import argparse
import os
from collections.abc import Sequence
from typing import Literal, get_args, get_origin, get_type_hints

import msgspec

from .config import Config, parse_size
from .errors import ConfigError

_SIZES = {"kv_cache_memory", "max_model_len", "max_num_batched_tokens", "max_queued_tokens"}  # may be written 2G, 8k


def add_flags(parser: argparse.ArgumentParser, *, groups: Sequence[str] = ("model", "engine", "server")) -> None:
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
        flag = "--" + field.name.replace("_", "-")
        if kind is bool:
            section.add_argument(flag, action=argparse.BooleanOptionalAction, default=None, help=text)
        elif get_origin(kind) is Literal:
            section.add_argument(flag, choices=get_args(kind), default=None, help=text)
        elif get_origin(kind) is tuple:
            section.add_argument(flag, nargs="+", default=None, metavar="NAME", help=text)
        else:
            section.add_argument(flag, default=None, metavar=_metavar(flag, kind), help=text)


def read_flags(namespace: argparse.Namespace) -> Config:
    """The Config of parsed flags; what was not given keeps its default. Raises ConfigError."""
    values: dict[str, object] = {}
    for name in Config.__struct_fields__:
        value = getattr(namespace, name, None)
        if value is not None:
            values[name] = parse_size(value) if name in _SIZES else value
    if "api_key" not in values and os.environ.get("PAGEWIRE_API_KEY"):
        values["api_key"] = [os.environ["PAGEWIRE_API_KEY"]]
    try:
        return msgspec.convert(values, Config, strict=False)
    except msgspec.ValidationError as error:
        what, _, where = str(error).partition(" - at `$.")
        flag = where.rstrip("`").partition("[")[0].replace("_", "-")
        raise ConfigError(f"--{flag}: {what[0].lower()}{what[1:]}.".replace("`", "")) from error


def _default(default: object) -> str:
    if default is None or default == () or default == "":
        return ""
    if isinstance(default, float):
        return f" (default: {default:g})"
    return f" (default: {default})"


def _metavar(flag: str, kind: object) -> str:
    text = str(kind)
    if "float" in text:
        return "MS" if flag.endswith("-ms") else "SECONDS" if flag.endswith("-s") else "SHARE"
    return "N" if "int" in text else "TEXT"
