"""From `--extension module:Class,option=value,…` to the class and its options."""

from typing import cast

from ...config.plugins import Options, find_class, split_spec
from .base import Extension


def load_extension(spec: str) -> tuple[type[Extension], Options]:
    """Imports the module. Raises ConfigError."""
    name, options = split_spec("--extension", spec)
    return cast(type[Extension], find_class("--extension", name, ("core", "wrap_attention"))), options
