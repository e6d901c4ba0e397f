"""Names and addresses as seen from this machine. Nothing is sent."""

import socket

import pytest

from pagewire.ipc.hosts import is_address, is_here, is_loopback


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.9.10", "::1", "localhost"])
def test_each_machine_is_its_own_loopback(host: str) -> None:
    assert is_loopback(host) and is_address(host) == (host != "localhost")


def test_an_address_of_another_machine_is_not_here() -> None:
    """198.51.100.0/24 is for documents (RFC 5737)."""
    assert is_address("198.51.100.7") and not is_loopback("198.51.100.7") and not is_here("198.51.100.7")
    assert not is_address("engines.invalid") and not is_loopback("engines.invalid")


def test_the_addresses_of_this_machine_are_here() -> None:
    assert is_here("127.0.0.1") and is_here("127.8.9.10")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("198.51.100.7", 9))
        except OSError:
            pytest.skip("this machine has no other address")
        assert is_here(probe.getsockname()[0])
