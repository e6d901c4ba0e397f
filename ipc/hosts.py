"""Where a host is, seen from this machine."""

import ipaddress
import socket


def is_address(host: str) -> bool:
    """Whether this is an IP address, and not a name."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def is_loopback(host: str) -> bool:
    """Whether this name or address means, on every machine, that machine itself. Resolves no names."""
    return host == "localhost" or (is_address(host) and ipaddress.ip_address(host).is_loopback)


def is_here(host: str) -> bool:
    """Whether this is an address or name of this machine."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.bind(address)
    except OSError:
        return False
    return True
