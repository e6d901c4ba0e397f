"""Sentences about engines that get no requests; `test_engines.py` has those of real connections."""

import socket

import aiohttp
import pytest
from aiohttp.client_reqrep import ConnectionKey

from pagewire.route.trouble import broken_off, not_ready, unreached

KEY = ConnectionKey("engine", 8000, False, True, None, None, None)


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (
            aiohttp.ClientConnectorDNSError(KEY, socket.gaierror(-2, "Name or service not known")),
            "The name engine cannot be resolved: Name or service not known.",
        ),
        (aiohttp.ClientConnectorError(KEY, OSError(113, "x")), "It cannot be reached: No route to host."),
        (
            aiohttp.ClientConnectorError(KEY, OSError("Multiple exceptions: a, b")),
            "It cannot be reached: Multiple exceptions: a, b.",
        ),
    ],
)
def test_a_connection_that_fails(error: aiohttp.ClientConnectorError, sentence: str) -> None:
    assert unreached(error) == sentence


def test_an_engine_says_itself_why_it_is_not_ready() -> None:
    assert not_ready(503, b'{"error": {"message": "The model is loading.", "code": "x"}}') == "The model is loading."
    assert len(not_ready(503, b'{"error": {"message": "%b"}}' % (b"x" * 1000))) == 200
    for body in (b"", b"<html>", b'{"error": "\xff"}'):
        assert not_ready(502, body) == "It is not ready (status 502)."


def test_the_hint_at_tls_is_for_addresses_without_it() -> None:
    assert "https://" in broken_off(has_tls=False) and "https://" not in broken_off(has_tls=True)
