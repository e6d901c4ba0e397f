"""The redis tier: blocks in a Redis or Valkey server, which engines on any machine read and write over the network.

`redis,url=redis://HOST:6379,size=20G`. The core half is that of a tier which several engines use (`shared.py`), with
the index of `redis_index.py`; the worker half is that of a storage (`file_worker.py`), with the one of
`redis_blocks.py`. A server that is dead, slow or full costs time, bounded by `timeout_ms` and `fetch_timeout_ms`, and
never changes a token.
"""

import importlib.util
import logging
from pathlib import Path
from urllib.parse import urlsplit

from msgspec import Struct

from ...errors import ConfigError
from ...ipc.hosts import is_here, is_loopback
from ..core.kv_connector import TierConnector
from .base import ConnectorFacts, Options, WorkerConnector
from .options import check_names, milliseconds_of, num_blocks_of, size_of
from .redis_blocks import RedisBlocks, RefusedError
from .redis_index import RedisIndex
from .shared import SharedCore

_OPTIONAL = ("ttl_s", "namespace", "password-file", "timeout_ms", "fetch_timeout_ms")
_SCHEMES = ("redis", "rediss", "unix")
_MAX_TTL_S = 10 * 365 * 86_400

log = logging.getLogger("pagewire.kv")


class Settings(Struct, frozen=True, kw_only=True):
    """The values of the options."""

    url: str  # without a password
    password: str | None
    size: int  # bytes, of all ranks of all engines with this model and namespace
    ttl_s: int  # how long an item stays that nobody uses
    namespace: str
    timeout_s: float  # how long a request waits for the answer to a look-up
    fetch_timeout_s: float  # how long a load waits for its next block


class RedisConnector:
    """`redis,url=redis://HOST:PORT/DB,size=20G[,ttl_s=86400][,namespace=NAME][,password-file=FILE]`."""

    @staticmethod
    def check(options: Options) -> None:
        read_settings(options)

    @staticmethod
    def core(options: Options, facts: ConnectorFacts) -> TierConnector:
        settings = read_settings(options)
        _check_hosts(settings, facts)
        blocks = _open(settings, facts, settings.timeout_s)
        try:
            num_blocks_of("redis", settings.size, facts.of_engine(max(map(blocks.file_bytes, range(facts.num_groups)))))
            num_kept = _greet(blocks, settings, facts)
        except BaseException:
            blocks.close()
            raise
        index = RedisIndex(blocks, settings.timeout_s)
        size = facts.share_of(settings.size)
        return SharedCore(name="redis", index=index, files=blocks, facts=facts, size=size, num_kept=num_kept)

    @staticmethod
    def worker(options: Options, facts: ConnectorFacts) -> WorkerConnector:
        from .file_worker import FileWorker  # needs torch
        from .room import SharedRoom

        settings = read_settings(options)
        blocks = _open(settings, facts, settings.fetch_timeout_s)
        room = SharedRoom(blocks, facts.share_of(settings.size))
        return FileWorker(
            name="redis", files=blocks, facts=facts, room=room, overwrite=False, stall_s=settings.fetch_timeout_s
        )


def read_settings(options: Options) -> Settings:
    """Connects to nothing. Raises ConfigError."""
    check_names("redis", options, required=["url", "size"], optional=_OPTIONAL)
    if importlib.util.find_spec("redis") is None:
        raise ConfigError("--kv-connector redis needs the package redis: pip install 'pagewire[redis]'.")
    url = options["url"]
    try:
        parts = urlsplit(url)
        _ = parts.port
    except ValueError:
        parts = urlsplit("")
    has_place = bool(parts.path) if parts.scheme == "unix" else bool(parts.hostname)
    if parts.scheme not in _SCHEMES or not has_place or parts.query or parts.fragment:
        raise ConfigError(
            f"--kv-connector redis: url={_without_password(url)} should be redis://HOST:PORT/DB, rediss://… for TLS, "
            "or unix:///PATH."
        )
    if parts.password is not None:
        raise ConfigError(
            f"--kv-connector redis: url={_without_password(url)} has a password, which every user of this machine "
            "could read; give password-file=FILE."
        )
    ttl = options.get("ttl_s", "86400")
    if not ttl.isascii() or not ttl.isdigit() or not 1 <= int(ttl) <= _MAX_TTL_S:
        raise ConfigError(f"--kv-connector redis: ttl_s={ttl} should be a number of seconds, 1 to {_MAX_TTL_S}.")
    namespace = options.get("namespace", "pagewire")
    if not namespace or not namespace.isascii() or not namespace.isprintable() or len(namespace) > 64:
        raise ConfigError(f"--kv-connector redis: namespace={namespace} should be 1 to 64 printable ASCII characters.")
    return Settings(
        url=url,
        password=_password(options["password-file"]) if "password-file" in options else None,
        size=size_of("redis", options),
        ttl_s=int(ttl),
        namespace=namespace,
        timeout_s=milliseconds_of("redis", "timeout_ms", options.get("timeout_ms", "100")) / 1000,
        fetch_timeout_s=milliseconds_of("redis", "fetch_timeout_ms", options.get("fetch_timeout_ms", "2000")) / 1000,
    )


def _password(path: str) -> str:
    try:
        return Path(path).expanduser().read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise ConfigError(f"--kv-connector redis: password-file={path} cannot be read: {reason}.") from None


def _without_password(url: str) -> str:
    scheme, separator, rest = url.partition("://")
    place = rest.rpartition("@")[2] if "@" in rest else rest
    return f"{scheme}{separator}{place}"


def _check_hosts(settings: Settings, facts: ConnectorFacts) -> None:
    """Raises ConfigError if ranks are on other machines and the address means a server of each machine's own. A core
    that replaces another one only logs it."""
    url = urlsplit(settings.url)
    if url.scheme != "unix" and url.hostname is not None and not is_loopback(url.hostname):
        return
    away = next((host for host in facts.hosts if host and not is_here(host)), None)
    if away is None:
        return
    problem = (
        f"--kv-connector redis: url={settings.url} leads to another server, or none, on {away}, where a rank is; name "
        "an address of the server that every machine reaches."
    )
    if facts.may_refuse:
        raise ConfigError(problem)
    log.warning("%s", problem)


def _open(settings: Settings, facts: ConnectorFacts, timeout_s: float) -> RedisBlocks:
    """Connects with the first command."""
    return RedisBlocks(
        url=settings.url, password=settings.password, namespace=settings.namespace, ttl_s=settings.ttl_s,
        timeout_s=timeout_s, facts=facts,
    )  # fmt: skip


def _greet(blocks: RedisBlocks, settings: Settings, facts: ConnectorFacts) -> int:
    """How many items the server has. Raises ConfigError if it does not let this engine in; a server that is not there
    may come later."""
    try:
        return blocks.count()
    except RefusedError as error:
        if facts.may_refuse:
            raise ConfigError(f"--kv-connector redis: the server at {settings.url} refuses: {error}.") from error
        log.warning("redis: the server at %s refuses: %s", settings.url, error)
    except OSError as error:
        log.warning("redis: the server at %s is not used until it answers: %s", settings.url, error)
    return 0
