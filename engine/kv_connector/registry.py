"""Opens the connectors of `--kv-connector`: `host,size=4G disk,path=DIR,size=20G` names two, nearest first."""

import os
from collections.abc import Callable, Sequence
from importlib.metadata import entry_points
from typing import TypeVar, cast

from ...config.config import parse_size
from ...config.plugins import Options, find_class, split_spec
from ...errors import ConfigError
from ..core.kv_connector import TierConnector
from .base import ConnectorFacts, HasCheck, KVConnector, Resizable, WorkerConnector
from .guard import Guarded, tier_connector
from .options import DEFAULT_SIZE, size_of

ENTRY_POINTS = "pagewire.kv_connectors"
"""The entry point group in which other packages name their connectors."""

Half = TypeVar("Half", TierConnector, WorkerConnector)

_FLAG = "--kv-connector"
_RESIZABLE = ("host", "disk")
_BUILT_IN = {
    "host": f"{__package__}.host:HostConnector",
    "disk": f"{__package__}.disk:DiskConnector",
    "shared": f"{__package__}.shared:SharedConnector",
    "redis": f"{__package__}.redis:RedisConnector",
    "p2p": f"{__package__}.p2p:P2pConnector",
}


def check(specs: Sequence[str]) -> None:
    """Checks the options before any process starts; opens nothing. Raises ConfigError."""
    seen = set()
    for spec in specs:
        connector, options = _parse(spec)
        if spec.partition(",")[0] in seen:
            raise ConfigError(f"--kv-connector {spec}: this connector is named twice; name it once.")
        seen.add(spec.partition(",")[0])
        found: object = connector
        if isinstance(found, HasCheck):
            found.check(options)


def check_follower(specs: Sequence[str]) -> None:
    """Raises ConfigError for a machine that lacks a file which the ranks there need, and which must be the lead's."""
    for spec in specs:
        name, options = split_spec(_FLAG, spec)
        if name == "p2p" and "key-file" in options and not os.path.exists(options["key-file"]):
            raise ConfigError(
                f"--kv-connector p2p: key-file={options['key-file']} does not exist there; copy the lead's."
            )


def host_bytes(specs: Sequence[str]) -> int:
    """The host's memory that the built-in ones of an engine take. Raises ConfigError."""
    total = 0
    for spec in specs:
        name, options = split_spec(_FLAG, spec)
        if name == "host" or (name == "p2p" and "serve" in options):
            total += size_of(name, {"size": DEFAULT_SIZE, **options})
    return total


def serve_addresses(specs: Sequence[str], num_ranks: int) -> list[str]:
    """Where the ranks of an engine with `p2p` answer peers. Raises ConfigError."""
    from .p2p_settings import rank_address

    options = [options for name, options in (split_spec(_FLAG, spec) for spec in specs) if name == "p2p"]
    return [rank_address(each["serve"], rank) for each in options if "serve" in each for rank in range(num_ranks)]


def in_folder(specs: Sequence[str], name: str) -> tuple[str, ...]:
    """These with a folder of this name in the folder of `disk`, which belongs to one engine."""
    found = []
    for spec in specs:
        connector, options = split_spec(_FLAG, spec)
        if connector == "disk" and "path" in options:
            options["path"] = os.path.join(options["path"], name)
        found.append(_joined(connector, options))
    return tuple(found)


def of_domain(specs: Sequence[str], domain: int, num_domains: int) -> tuple[str, ...]:
    """What these are for one of several KV domains. It alone uses its `host` and its `disk`, so it gets an equal part
    of their sizes, and a folder of its own. The others are used by all domains together."""
    if num_domains == 1:
        return tuple(specs)
    found = []
    for spec in in_folder(specs, f"domain-{domain}-of-{num_domains}"):
        name, options = split_spec(_FLAG, spec)
        if name in _RESIZABLE:
            options["size"] = str(max(1, size_of(name, options) // num_domains))
        found.append(_joined(name, options))
    return tuple(found)


def core_connector(specs: Sequence[str], facts: ConnectorFacts) -> TierConnector | None:
    """The core halves as one; None if there are none. Raises ConfigError."""
    opened = _open(specs, lambda connector, options: tier_connector(connector.core(options, facts), "", facts))
    if len(opened) < 2:
        return opened[0] if opened else None
    from .chain import ChainCore

    return ChainCore(opened)


def check_smaller(start: Sequence[str], specs: Sequence[str]) -> None:
    """Raises ConfigError for specs that differ from those of the start in more than smaller sizes of tiers that can be
    changed while requests are served."""
    same = [spec.partition(",")[0] for spec in specs] == [spec.partition(",")[0] for spec in start]
    if same:  # else a name could be that of a module, whose import would run its code
        check(specs)
    for before, after in zip(start, specs, strict=False) if same else ():
        name, old = split_spec(_FLAG, before)
        new = split_spec(_FLAG, after)[1]
        if {**old, "size": ""} != {**new, "size": ""} or (old != new and name not in _RESIZABLE):
            same = False
        elif "size" in old and parse_size(new["size"]) > parse_size(old["size"]):
            raise ConfigError(f"kv_connector {after}: the start was given {before}; more needs a restart.")
    if not same:
        raise ConfigError(
            f"kv_connector needs a restart, but for the size of {' and '.join(_RESIZABLE)}, up to that of the start."
        )


def resize(connector: TierConnector, specs: Sequence[str]) -> None:
    """Gives the tiers the sizes of these specs, which `check_smaller` has accepted. connector: of `core_connector`."""
    parts = getattr(connector, "parts", [connector])
    for part, spec in zip(parts, specs, strict=True):
        if isinstance(part, Resizable):
            part.resize(parse_size(split_spec(_FLAG, spec)[1]["size"]))


def worker_connector(specs: Sequence[str], facts: ConnectorFacts) -> WorkerConnector | None:
    """The worker halves as one; None if there are none. Raises ConfigError."""
    opened = _open(specs, lambda connector, options: connector.worker(options, facts))
    if len(opened) < 2:
        return opened[0] if opened else None
    from .chain import ChainWorker

    return ChainWorker(opened)


def _joined(name: str, options: Options) -> str:
    return ",".join([name, *(f"{option}={value}" for option, value in options.items())])


def _open(specs: Sequence[str], half: Callable[[type[KVConnector] | Guarded, Options], Half]) -> list[Half]:
    """One half of each connector. If one fails to open, those before it are closed."""
    check(specs)
    opened: list[Half] = []
    try:
        for spec in specs:
            opened.append(half(*_parse(spec)))
    except BaseException:
        for part in opened:
            part.close()
        raise
    return opened


def _parse(spec: str) -> tuple[type[KVConnector] | Guarded, Options]:
    """The class, guarded unless it is built in, and its options."""
    name, options = split_spec(_FLAG, spec)
    target = _BUILT_IN.get(name, name)
    if ":" not in target:
        others = {point.name: point for point in entry_points(group=ENTRY_POINTS)}
        if target not in others:
            known = ", ".join(sorted([*_BUILT_IN, *others]))
            raise ConfigError(f"{_FLAG} {name!r} is not known; there are {known}, or write module:Class.")
        target = others[target].value
    found = cast(type[KVConnector], find_class(_FLAG, target, ("core", "worker")))
    return found if name in _BUILT_IN else Guarded(found, name), options
