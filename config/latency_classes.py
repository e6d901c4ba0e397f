"""Latency classes: what an operator promises to requests. Under `--scheduling-policy slo` they are ordered by it."""

import string
from collections.abc import Mapping
from typing import Annotated

from msgspec import Meta, Struct

from ..errors import ConfigError

DEFAULT_CLASS = "default"
"""The class of requests that name none. The operator need not describe it; then it has no targets."""

BATCH_CLASS = "batch"
"""The class of requests in batches, if the operator describes it."""

_MAX_NAME = 32
_LETTERS = frozenset(string.ascii_lowercase)
_CHARACTERS = _LETTERS | set(string.digits + "_-")


class LatencyClass(Struct, frozen=True, forbid_unknown_fields=True):
    """The promise to the requests of a class."""

    ttft_ms: Annotated[float, Meta(gt=0, le=1e9)] | None = None  # from arrival to the first token; None: no target
    itl_ms: Annotated[float, Meta(gt=0, le=1e9)] | None = None  # between two tokens; None: no target
    # How soon a request without a target, or that has missed it, goes before newcomers: after 30 s / weight.
    weight: Annotated[float, Meta(gt=0, le=1e6)] = 1.0
    # Of the tokens, while other classes wait; it holds no request back for longer than that time after its place.
    share: Annotated[float, Meta(gt=0, le=1)] = 1.0


def with_default(classes: Mapping[str, LatencyClass] | None) -> dict[str, LatencyClass]:
    """The classes, and the one of requests that name none; empty without classes."""
    return {DEFAULT_CLASS: LatencyClass()} | dict(classes) if classes else {}


def check_classes(classes: Mapping[str, LatencyClass], policy: str) -> None:
    """Raises ConfigError for a name that is none, and if the policy `slo` has no class."""
    for name in classes:
        is_plain = 0 < len(name) <= _MAX_NAME and name[0] in _LETTERS and _CHARACTERS.issuperset(name)
        if not is_plain or name == "auto":
            raise ConfigError(
                f"--latency-classes: {name[:40]!r} is not a name; write up to {_MAX_NAME} of a-z, 0-9, _ and -, "
                "beginning with a letter, and not auto, which asks for the class of the key."
            )
    if policy == "slo" and not classes:
        raise ConfigError(
            "--scheduling-policy slo orders requests by the targets of their classes: give --latency-classes."
        )
