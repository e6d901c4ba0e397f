"""The options after a connector's name on the command line."""

from collections.abc import Iterable

from ...config.config import parse_size
from ...errors import ConfigError
from ..core.eviction import RANKINGS, EvictionQueue
from .base import Options

DEFAULT_SIZE = "1G"
"""Of the memory in which `p2p` keeps what it serves."""

MAX_WAIT_MS = 600_000
"""The longest time that an option may ask for."""


def check_names(connector: str, options: Options, *, required: Iterable[str], optional: Iterable[str] = ()) -> None:
    """Raises ConfigError for an option that is missing, empty or unknown."""
    required, optional = list(required), list(optional)
    for name in options:
        if name not in required and name not in optional:
            known = ", ".join([*required, *optional])
            raise ConfigError(f"--kv-connector {connector} has no option {name!r}; it has {known}.")
    for name in required:
        if not options.get(name):
            raise ConfigError(f"--kv-connector {connector} needs {name}=…, such as {_EXAMPLES[connector]}.")


def size_of(connector: str, options: Options) -> int:
    """The option `size` in bytes. Raises ConfigError."""
    try:
        size = parse_size(options["size"])
    except ConfigError as error:
        raise ConfigError(f"--kv-connector {connector},size={options['size']}: {error}") from None
    if size == 0:
        raise ConfigError(f"--kv-connector {connector},size={options['size']}: it must be more than 0.")
    return size


def milliseconds_of(connector: str, option: str, text: str) -> int:
    """Raises ConfigError."""
    if not text.isascii() or not text.isdigit() or not 1 <= int(text) <= MAX_WAIT_MS:
        raise ConfigError(
            f"--kv-connector {connector}: {option}={text} should be a number of milliseconds, 1 to {MAX_WAIT_MS}."
        )
    return int(text)


def eviction_of(connector: str, options: Options) -> EvictionQueue:
    """The option `eviction` as an empty queue. Raises ConfigError."""
    name = options.get("eviction", "lru")
    if name not in RANKINGS:
        raise ConfigError(f"--kv-connector {connector},eviction={name}: it must be one of {', '.join(RANKINGS)}.")
    return EvictionQueue(RANKINGS[name]())


def num_blocks_of(connector: str, size: int, bytes_each: int) -> int:
    """How many blocks fit into `size` bytes. Raises ConfigError if not even one does."""
    if size < bytes_each:
        raise ConfigError(
            f"--kv-connector {connector},size={size} is too small: one block of this model takes {bytes_each} bytes."
        )
    return size // bytes_each


_EXAMPLES = {
    "host": "host,size=4G",
    "disk": "disk,path=/var/cache/kv,size=20G",
    "shared": "shared,path=/dev/shm/kv,size=8G",
    "redis": "redis,url=redis://10.0.0.1:6379,size=20G",
}
