"""What a router is told: the door that it has in common with an engine's server, and its engines."""

import argparse
from pathlib import Path

from msgspec.structs import asdict

from ..api.http.tls import tls_context
from ..config.access import read_key_file
from ..config.config import DoorConfig
from ..config.flags import add_flags, read_flags
from ..config.resolve import resolve_door
from ..errors import ConfigError

_GROUPS = ("door", "access", "limits")


class RouteConfig(DoorConfig, frozen=True, kw_only=True):
    """The whole truth about one router."""

    engines: tuple[str, ...]
    max_open_requests: int | None = None
    cacert: str | None = None


def add_route_flags(parser: argparse.ArgumentParser) -> None:
    """Those of `pagewire route`."""
    section = parser.add_argument_group("engines")
    section.add_argument(
        "--engines",
        required=True,
        metavar="URL,URL",
        help="the servers behind it, all with the same model: http:// or https://, or unix:PATH of a socket",
    )
    section.add_argument("--cacert", metavar="FILE", help="certificates by which to know https engines")
    section.add_argument(
        "--max-open-requests", type=int, metavar="N", help="most requests that a key may have open, or all without keys"
    )
    add_flags(parser, groups=_GROUPS)


def read_route(arguments: argparse.Namespace) -> RouteConfig:
    """The RouteConfig of parsed flags. Raises ConfigError."""
    said = read_flags(arguments)
    engines = tuple(url.strip().rstrip("/") for url in arguments.engines.split(",") if url.strip())
    if not engines or len(set(engines)) < len(engines):
        raise ConfigError(f"--engines {arguments.engines}: write the engines' addresses, each once, with commas.")
    if arguments.max_open_requests is not None and arguments.max_open_requests < 1:
        raise ConfigError("--max-open-requests must be at least 1.")
    keys = () if said.api_key_file is None else read_key_file(Path(said.api_key_file))
    file = said.admin_api_key_file
    admin_keys = () if file is None else read_key_file(Path(file), "--admin-api-key-file")
    config = RouteConfig(
        **asdict(resolve_door(said, keys, admin_keys)),
        engines=engines,
        max_open_requests=arguments.max_open_requests,
        cacert=arguments.cacert,
    )
    tls_context(config)
    return config
