"""What a router is given: its engines, and what it has in common with an engine's api process."""

import argparse

from msgspec import Struct

from ..config.config import HttpConfig
from ..config.flags import add_flags, read_flags
from ..errors import ConfigError
from ..procs.prepare import prepare_http

_GROUPS = ("network", "access", "limits")


class RouteConfig(Struct, frozen=True, kw_only=True):
    """What one router is given."""

    http: HttpConfig
    engines: tuple[str, ...]  # their URLs
    max_open_requests: int | None = None
    cacert: str | None = None


def add_route_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of `pagewire route`."""
    section = parser.add_argument_group("engines")
    section.add_argument(
        "--engines",
        required=True,
        metavar="URL,URL",
        help="the servers behind it: http:// or https://, or unix:PATH of a socket",
    )
    section.add_argument("--cacert", metavar="FILE", help="certificates by which to know https engines")
    section.add_argument(
        "--max-open-requests", type=int, metavar="N", help="most requests that a key may have open, or all without keys"
    )
    add_flags(parser, groups=_GROUPS)


def read_route(arguments: argparse.Namespace) -> RouteConfig:
    """Raises ConfigError."""
    config = read_flags(arguments)
    engines = tuple(url.strip().rstrip("/") for url in arguments.engines.split(",") if url.strip())
    if not engines or len(set(engines)) < len(engines):
        raise ConfigError(f"--engines {arguments.engines}: write the engines' addresses, each once, with commas.")
    if arguments.max_open_requests is not None and arguments.max_open_requests < 1:
        raise ConfigError("--max-open-requests must be at least 1.")
    return RouteConfig(
        http=prepare_http(config),
        engines=engines,
        max_open_requests=arguments.max_open_requests,
        cacert=arguments.cacert,
    )
