"""What a plan extension is: bytes that the core decides plan by plan, and an attention backend that knows them.

The core half (`engine.core.extension.PlanExtension`, no torch) is asked once for every plan that has rows, and its
bytes travel as `StepPlan.extension`. On the worker they reach the attention backend in `AttentionStep.extension`, and
`AttentionStep.order` says which of the plan's rows each row of the step is. `wrap_attention` puts a backend of one's
own around the engine's, or in its place.

An extension is named on the command line as `module:Class,option=value,…`; the class has the two static methods of
`Extension`. Its name and options are part of what the KV cache's keys stand for, because attention that computes
something else gives other keys and values in the layers above.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, cast

from ..config.plugins import Options as Options
from ..config.plugins import find_class, split_spec
from .core.extension import PlanExtension

if TYPE_CHECKING:
    from .attention.base import AttentionBackend
    from .attention.kv_cache import KvCache


class Extension(Protocol):
    """What a name stands for. Neither method is called in the other's process, so `core` must not need torch."""

    @staticmethod
    def core(options: Options) -> PlanExtension:
        """The core half. Raises ConfigError for options that make no sense."""

    @staticmethod
    def wrap_attention(options: Options, backend: AttentionBackend, cache: KvCache) -> AttentionBackend:
        """The backend that the model's layers are to call instead of `backend`. Once, when the cache is open.
        Raises ConfigError."""


def load_extension(spec: str) -> tuple[type[Extension], Options]:
    """The class behind `--extension module:Class,option=value,…`, and its options. Raises ConfigError."""
    name, options = split_spec("--extension", spec)
    return cast(type[Extension], find_class("--extension", name, ("core", "wrap_attention"))), options
