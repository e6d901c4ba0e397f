"""Checks of keys with their rates and rights, of origins, and of the settings of certificates."""

import re
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta, Struct
from msgspec.structs import replace

from ..errors import ConfigError

_ORIGIN = re.compile(r"\*|[a-z][a-z0-9+.-]*://[^/\s@?#]+")
_PRINTABLE = re.compile(r"[\x21-\x7e]+")


class ApiKey(Struct, frozen=True, forbid_unknown_fields=True):
    """A key, its rates, and what its requests may ask for; None: no bound."""

    key: str
    requests_per_minute: Annotated[int, Meta(ge=1)] | None = None
    tokens_per_minute: Annotated[int, Meta(ge=1)] | None = None
    latency_classes: tuple[str, ...] | None = None  # the first one is that of requests that name none
    min_priority: Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)] | None = None  # the most urgent `priority`


def read_key_file(path: Path, flag: str = "--api-key-file") -> tuple[ApiKey, ...]:
    """Reads lines such as `KEY requests_per_minute=60 latency_classes=chat,batch`; what follows the key is optional.
    Empty lines and those that begin with # are skipped. Raises ConfigError, which names the line and never the key."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ConfigError(f"{flag} {path} cannot be read: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{flag} {path} is not UTF-8.") from error
    found = []
    for number, line in enumerate(lines, 1):
        words = line.split()
        if words and not words[0].startswith("#"):
            try:
                more = dict(word.split("=", 1) for word in words[1:])
                names = {name: text.split(",") for name, text in more.items() if name == "latency_classes"}
                found.append(msgspec.convert({**more, **names, "key": words[0]}, ApiKey, strict=False))
            except (ValueError, msgspec.ValidationError) as error:
                raise ConfigError(
                    f"{flag} {path}, line {number}: after the key there may be requests_per_minute=N, "
                    "tokens_per_minute=N, latency_classes=NAME,NAME and min_priority=N, and nothing else."
                ) from error
    if not found:
        raise ConfigError(f"{flag} {path} holds no key, so it would let everyone in; add one or leave the flag out.")
    return tuple(found)


def check_key_classes(keys: Iterable[ApiKey], classes: Collection[str]) -> None:
    """Raises ConfigError for a latency class of a key that is none of `classes`."""
    for name in {name for key in keys for name in key.latency_classes or ()} - set(classes):
        raise ConfigError(f"--api-key-file: {name[:40]!r} is none of --latency-classes.")


def merge_keys(
    keys: Iterable[ApiKey], requests_per_minute: int | None, tokens_per_minute: int | None
) -> tuple[ApiKey, ...]:
    """The keys, with these rates where a key has none of its own. Raises ConfigError, which never shows a key."""
    found: dict[str, ApiKey] = {}
    for one in keys:
        if not _PRINTABLE.fullmatch(one.key):
            raise ConfigError("An API key must be printable ASCII characters without a space, and not empty.")
        if one.key in found:
            raise ConfigError("An API key is given twice; leave one of the two out.")
        found[one.key] = replace(
            one,
            requests_per_minute=one.requests_per_minute or requests_per_minute,
            tokens_per_minute=one.tokens_per_minute or tokens_per_minute,
        )
    return tuple(found.values())


def check_tls(certfile: str | None, keyfile: str | None, ca_certs: str | None, cert_reqs: int) -> None:
    """Raises ConfigError if one of these settings lacks another that it needs."""
    if certfile is None and (keyfile is not None or ca_certs is not None or cert_reqs):
        raise ConfigError("TLS needs a certificate; give --ssl-certfile as well.")
    if (ca_certs is not None) != (cert_reqs > 0):
        raise ConfigError("--ssl-ca-certs and --ssl-cert-reqs 1 or 2 check clients together; give both or neither.")


def check_origins(origins: Iterable[str]) -> None:
    """Raises ConfigError for a text that is not an origin."""
    for origin in origins:
        if not _ORIGIN.fullmatch(origin):
            raise ConfigError(f"--allowed-origins {origin} is not an origin: write https://host, http://host:port, *.")


def check_root_path(text: str) -> str:
    """Returns it without a slash at its end. Raises ConfigError."""
    path = text.rstrip("/")
    if path and not path.startswith("/"):
        raise ConfigError(f"--root-path {text} must begin with a slash.")
    return path
