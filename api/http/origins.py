"""Which web pages may use the server: its own, and those of the origins that the operator allows (CORS).

A browser sends a page's requests to any address that the page names, even to a server on the user's own machine, and
names the page's origin in the `Origin` header. Other programs send no such header.
"""

import re
from collections.abc import Mapping

from ...config.config import HttpConfig
from ...ipc.hosts import is_address, is_loopback
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
    """The operator's choice of origins."""

    def __init__(self, config: HttpConfig) -> None:
        self._allowed = frozenset(origin.rstrip("/").lower().encode() for origin in config.clients.allowed_origins)
        self._names = frozenset(_name(origin.partition(b"://")[2]) for origin in self._allowed)
        # The owner of any name can let it resolve to this machine (DNS rebinding); a page of that name then has the
        # server's own origin. A server on loopback without keys is open to this machine only, so it answers to no name
        # that others control.
        is_local = config.listen.uds is None and is_loopback(config.listen.host)
        self._trusts_names = bool(config.api_keys) or not is_local or b"*" in self._allowed

    def check_name(self, host: bytes) -> None:
        """Raises HttpError 403 if others could control the name in `host`, the Host header."""
        if self._trusts_names or not host:  # browsers always send the header
            return
        name = _name(host)
        if not (is_loopback(name) or is_address(name) or name.endswith(".localhost") or name in self._names):
            raise HttpError(
                403,
                "A server without keys that listens on loopback answers to localhost, addresses and the names in "
                "--allowed-origins only.",
            )

    def headers(self, headers: Mapping[bytes, bytes]) -> Headers:
        """The headers that let the page read the response. Raises HttpError 403."""
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
        if origin.partition(b"://")[2].lower() != headers.get(b"host", b"").lower():
            raise HttpError(403, "Requests from other origins are not allowed; see --allowed-origins.")
        return ()

    def preflight(self, headers: Mapping[bytes, bytes]) -> Headers | None:
        """The headers of the response to a preflight request, which has no key; None if this is not one."""
        if b"origin" not in headers or b"access-control-request-method" not in headers:
            return None
        wanted = headers.get(b"access-control-request-headers", b"")
        return (
            (b"access-control-allow-methods", b"GET, POST, PATCH, DELETE"),
            *(((b"access-control-allow-headers", wanted),) if _NAMES.fullmatch(wanted) else ()),
            (b"access-control-max-age", b"600"),
        )


def _name(host: bytes) -> str:
    """The host without port and brackets."""
    text = host.decode("latin-1").lower()
    return text[1:].partition("]")[0] if text.startswith("[") else text.partition(":")[0]
