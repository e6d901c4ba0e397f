"""From `--extension module:Class,option=value,…` to the class and its options."""

import importlib
from typing import cast

from ...errors import ConfigError
from .base import Extension, Options


def load_extension(spec: str) -> tuple[type[Extension], Options]:
    """Imports the module. Raises ConfigError."""
    name, *parts = spec.split(",")
    module_name, _, class_name = name.partition(":")
    if not module_name or not class_name:
        raise ConfigError(f"--extension {spec}: write module:Class, with options as module:Class,option=value.")
    options: Options = {}
    for part in parts:
        option, equals, value = part.partition("=")
        if not option or not equals or option in options:
            raise ConfigError(f"--extension {spec}: {part!r} is not an option=value that stands there once.")
        options[option] = value
    try:
        found = getattr(importlib.import_module(module_name), class_name, None)
    except Exception as error:  # whatever somebody's module raises, the answer is the same
        raise ConfigError(
            f"--extension {spec}: {module_name} cannot be imported ({type(error).__name__}: {error})."
        ) from error
    if not all(callable(getattr(found, method, None)) for method in ("core", "wrap_attention")):
        raise ConfigError(f"--extension {spec}: {module_name} has no class {class_name} with core and wrap_attention.")
    return cast(type[Extension], found), options
