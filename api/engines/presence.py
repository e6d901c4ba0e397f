"""Which of several engines get a request for a model, if not all of them have it: a decision without state.

A model that is loaded somewhere is used there. It is loaded by another engine as well if those that have it are much
busier than their share and the other one has room beside what it has loaded. Only a model that no engine has loaded or
has room for makes an engine unload another one. Where a model is loaded follows from its name, so that several routers,
and requests that come before an engine has said what it loads, agree.
"""

from collections.abc import Callable, Mapping, Sequence
from enum import IntEnum
from typing import Protocol, TypeVar

from .stable_hash import stable_hash


class Presence(IntEnum):
    """A model at an engine that serves it, the best one first."""

    LOADED = 0  # or being loaded, or next to be
    FITS = 1  # there is room for it
    UNLOADED = 2  # another model would have to go
    FAILED = 3  # it could not be loaded there


class Host(Protocol):
    """An engine, as far as this decision knows it."""

    name: str
    models: Mapping[str, Presence]

    @property
    def load(self) -> int: ...


H = TypeVar("H", bound=Host)


def best_for(model: str, hosts: Sequence[H], takes: Callable[[H], bool]) -> list[H]:
    """The engines for a request, of those that are able; empty: none serves this model. `takes`: whether an engine has
    no more to do than its share, and a little."""
    where: dict[Presence, list[H]] = {presence: [] for presence in Presence}
    for host in hosts:
        presence = host.models.get(model) if host.models else Presence.LOADED  # one that says nothing is asked
        if presence is not None:
            where[presence].append(host)
    loaded, fits = where[Presence.LOADED], where[Presence.FITS]
    if any(takes(host) for host in loaded):
        return loaded
    if fits:
        return [min(fits, key=lambda host: (_num_loaded(host), _place(model, host)))]
    if loaded:
        return loaded
    others = where[Presence.UNLOADED] or where[Presence.FAILED]
    return [min(others, key=lambda host: (host.load > 0, _place(model, host)))] if others else []


def _num_loaded(host: Host) -> int:
    return sum(presence is Presence.LOADED for presence in host.models.values())


def _place(model: str, host: Host) -> int:
    """In an order of all engines that each model has of its own."""
    return stable_hash(f"{model} {host.name}".encode())
