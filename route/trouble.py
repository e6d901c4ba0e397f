"""Why an engine gets no new requests, in one sentence for the log and for /health."""

import contextlib
import os

import aiohttp
import msgspec
from msgspec import Struct

UNCHECKED = "It has not been checked yet."


class _Error(Struct):
    message: str


class _Complaint(Struct):
    """The fields of /ready that the router reads when an engine is not ready."""

    error: _Error


def unreached(error: aiohttp.ClientConnectorError) -> str:
    """There is no connection."""
    cause = error.os_error
    match error:
        case aiohttp.ClientConnectorDNSError():
            return f"The name {error.host} cannot be resolved: {cause.strerror}."
        case aiohttp.ClientConnectorCertificateError():
            return f"Its certificate is not trusted: {_tls_reason(cause)}."
        case aiohttp.ClientConnectorSSLError():
            return f"TLS with it fails: {_tls_reason(cause)}."
    # The message of an asyncio error names the address again; one of several addresses has no number.
    return f"It cannot be reached: {os.strerror(cause.errno) if cause.errno else cause}."


def broken_off(*, has_tls: bool) -> str:
    """There was a connection, and no HTTP answer."""
    hint = "" if has_tls else "; if it uses TLS, write https:// in its address"
    return f"It closes connections without an answer{hint}."


def not_ready(status: int, body: bytes) -> str:
    """/ready has answered with this status, which is not 200."""
    with contextlib.suppress(msgspec.MsgspecError, UnicodeDecodeError):
        return msgspec.json.decode(body, type=_Complaint).error.message[:200]
    return f"It is not ready (status {status})."


def _tls_reason(cause: OSError) -> str:
    """In OpenSSL's words, without its codes and the line of its source."""
    reason = getattr(cause, "verify_message", None) or getattr(cause, "reason", None) or str(cause)
    return str(reason).replace("_", " ").lower()
