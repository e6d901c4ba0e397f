"""Which web pages may use the server: its own, and those of the origins that the operator allows (CORS).

A browser sends a page's requests to any address that the page names, also to a server on its reader's own machine, and
tells in `Origin` whose page it is. Programs that are no browsers send none.
"""

import ipaddress
import re
from collections.abc import Mapping
from urllib.parse import urlsplit

from ..config import EngineConfig
from .http_error import HttpError

_NAMES = re.compile(rb"[A-Za-z0-9!#$%&'*+.^_`|~-]{1,64}(,[ \t]*[A-Za-z0-9!#$%&'*+.^_`|~-]{1,64}){0,63}")
_EXPOSED = b", ".join(
    [
        b"x-request-id",
        b"retry-after",
        *(
            b"x-ratelimit-" + word + what
            for what in (b"requests", b"tokens")
            for word in (b"limit-", b"remaining-", b"reset-")
        ),
    ]
)

Headers = tuple[tuple[bytes, bytes], ...]


class Origins:
    """What is allowed to whom."""

    def __init__(self, config: EngineConfig) -> None:
        self._allowed = frozenset(origin.rstrip("/").lower().encode() for origin in config.allowed_origins)
        # A page of any name can have that name lead to this machine, and be of the same origin then. Where nobody but
        # this machine's people should reach the server, and nothing else tells them apart, no such name is trusted.
        self._trusts_names = bool(config.api_keys) or config.uds is not None or not _is_loopback(config.host)

    def headers(self, headers: Mapping[bytes, bytes]) -> Headers:
        """What the answer must carry for the page to read it. Raises HttpError 403."""
        origin = headers.get(b"origin")
        if origin is None:
            return ()
        if b"*" in self._allowed:
            return ((b"access-control-allow-origin", b"*"), (b"access-control-expose-headers", _EXPOSED))
        if origin.lower() in self._allowed:
            return (
                (b"access-control-allow-origin", origin),
                (b"access-control-expose-headers", _EXPOSED),
                (b"vary", b"origin"),
            )
        host = origin.partition(b"://")[2].lower()
        if host != headers.get(b"host", b"").lower() or not (self._trusts_names or _is_sure(host)):
            raise HttpError(403, "Requests from other origins are not allowed; see --allowed-origins.")
        return ()

    def preflight(self, headers: Mapping[bytes, bytes]) -> Headers | None:
        """The answer to a browser that asks what it may send, if this is one; it never has a key."""
        if b"origin" not in headers or b"access-control-request-method" not in headers:
            return None
        wanted = headers.get(b"access-control-request-headers", b"")
        return (
            (b"access-control-allow-methods", b"GET, POST, DELETE"),
            *(((b"access-control-allow-headers", wanted),) if _NAMES.fullmatch(wanted) else ()),
            (b"access-control-max-age", b"600"),
        )


def _is_loopback(name: str) -> bool:
    try:
        return name == "localhost" or ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


def _is_sure(host: bytes) -> bool:
    """An address, or this machine's own name: nobody elsewhere decides where it leads."""
    name = urlsplit("//" + host.decode("latin-1")).hostname or ""
    try:
        return name == "localhost" or bool(ipaddress.ip_address(name))
    except ValueError:
        return False
