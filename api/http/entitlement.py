"""Which latency classes and priorities a request may have, by its key."""

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from msgspec.structs import replace

from ...config.latency_classes import DEFAULT_CLASS
from ...ipc.messages import Submit
from .http_error import HttpError

HEADER = b"x-latency-class"
"""Names the class of a request whatever its body says."""

_TIERS = frozenset({"auto", "default", "flex", "priority", "scale", "standard", "standard_only"})
"""Tiers of other services, which clients may send without knowing this server's classes."""


class Entitlement(NamedTuple):
    """What the requests of a key may ask for; None: no bound."""

    latency_classes: tuple[str, ...] | None = None
    min_priority: int | None = None

    def apply(
        self, submits: Sequence[Submit], headers: Mapping[bytes, bytes], classes: Collection[str]
    ) -> list[Submit]:
        """The request with the class that it gets: the one that its header names, else its `service_tier`, else the
        first one of the key. `classes`: those of the server, if it has any. Raises HttpError 400 for a name that is
        none, and 403 for what the key does not allow."""
        bound = self.min_priority
        if bound is not None and any(submit.priority < bound for submit in submits):
            raise HttpError(403, f"With this key priority must be at least {bound}.", param="priority")
        if not classes:
            return [replace(submit, latency_class="") for submit in submits]
        header = headers.get(HEADER, b"").decode("ascii", "replace")
        name = self._choose(header, submits[0].latency_class, classes)
        return [replace(submit, latency_class=name) for submit in submits]

    def _choose(self, header: str, tier: str, classes: Collection[str]) -> str:
        own = self.latency_classes
        first = own[0] if own is not None and own[0] in classes else DEFAULT_CLASS
        name, where = (header, "X-Latency-Class") if header else (tier, "service_tier")
        if not name or name == "auto" or (name in _TIERS - set(classes) and not header):
            return first
        if name not in classes:
            text = f"{where} {name[:64]!r} is not a latency class of this server: {', '.join(sorted(classes))}."
            raise HttpError(400, text, param=None if header else "service_tier")
        if own is not None and name not in (first, *own):
            raise HttpError(403, f"This key may not use the latency class {name!r}; it has {', '.join(own)}.")
        return name


EVERYTHING = Entitlement()
"""Of requests to a server without keys, and of administrators."""
