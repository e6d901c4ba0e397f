"""Plan extensions: bytes that the core computes for each plan, and an attention backend that reads them.

The core half (`engine.core.extension.PlanExtension`, no torch) is called once for every plan that has rows, and its
bytes travel as `StepPlan.extension`. On the worker they reach the attention backend in `AttentionStep.extension`, and
`AttentionStep.order` maps the rows of the step to the plan's rows. `wrap_attention` wraps the engine's attention
backend, or replaces it.

An extension is named on the command line as `module:Class,option=value,…`; the class has the two static methods of
`Extension`. Its name and options are part of the KV cache's keys, because different attention gives different keys and
values in the layers above.
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
    """Each method is called in one process only, so `core` must not need torch."""

    @staticmethod
    def core(options: Options) -> PlanExtension:
        """The core half; each KV domain has one. Raises ConfigError for options that make no sense."""

    @staticmethod
    def wrap_attention(options: Options, backend: AttentionBackend, cache: KvCache) -> AttentionBackend:
        """The backend that the model's layers call instead of `backend`. Called once, when the cache is open. Raises
        ConfigError."""


def load_extension(spec: str) -> tuple[type[Extension], Options]:
    """The class behind `--extension module:Class,option=value,…`, and its options. Raises ConfigError."""
    name, options = split_spec("--extension", spec)
    return cast(type[Extension], find_class("--extension", name, ("core", "wrap_attention"))), options
