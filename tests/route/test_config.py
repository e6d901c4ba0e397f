"""Settings of a router."""

import argparse

import pytest

from pagewire.errors import ConfigError
from pagewire.route.config import RouteConfig, add_route_flags, read_route


def read(*argv: str) -> RouteConfig:
    parser = argparse.ArgumentParser()
    add_route_flags(parser)
    return read_route(parser.parse_args(argv))


def test_a_router_has_the_network_flags_of_a_server() -> None:
    config = read("--engines", "http://a:1/, unix:/b", "--api-key", "k", "--admin-api-key", "r", "--outage-wait", "3")
    assert config.engines == ("http://a:1", "unix:/b")
    assert [key.key for key in config.http.api_keys] == ["k"] and [key.key for key in config.http.admin_keys] == ["r"]
    assert config.http.service.outage_wait == 3 and config.http.listen.port == 8000


@pytest.mark.parametrize(
    "argv",
    [
        ["--engines", ","],
        ["--engines", "http://a:1,http://a:1/"],
        ["--engines", "http://a:1", "--max-open-requests", "0"],
        ["--engines", "http://a:1", "--root-path", "x"],
        ["--engines", "http://a:1", "--ssl-certfile", "/nothing"],
    ],
)
def test_invalid_settings_are_refused(argv: list[str]) -> None:
    with pytest.raises(ConfigError):
        read(*argv)
