"""Classes that users name on the command line: `module:Class,option=value,…`."""

import importlib
from collections.abc import Sequence
from importlib.util import find_spec

from ..errors import ConfigError

Options = dict[str, str]

_FORM = "write module:Class, with options as module:Class,option=value."


def split_spec(flag: str, spec: str) -> tuple[str, Options]:
    """Returns the name and its options. Raises ConfigError."""
    name, *parts = spec.split(",")
    options: Options = {}
    for part in parts:
        option, equals, value = part.partition("=")
        if not option or not equals or option in options:
            raise ConfigError(f"{flag} {spec}: {part!r} is not an option=value, or the option is given twice.")
        options[option] = value
    return name, options


def check_module(flag: str, spec: str) -> None:
    """Checks `module:Class,option=value,…` without importing the module, which may need torch. Raises ConfigError."""
    name, _ = split_spec(flag, spec)
    module, colon, class_name = name.partition(":")
    if not module or not colon or not class_name:
        raise ConfigError(f"{flag} {name}: {_FORM}")
    try:
        is_there = find_spec(module) is not None
    except Exception:  # of a package that holds it
        is_there = False
    if not is_there:
        raise ConfigError(f"{flag} {name}: there is no module {module}; is its folder in PYTHONPATH?")


def find_class(flag: str, target: str, methods: Sequence[str]) -> object:
    """Imports `module:Class`. Raises ConfigError if that fails or one of `methods` is missing."""
    module_name, colon, class_name = target.partition(":")
    if not module_name or not colon or not class_name:
        raise ConfigError(f"{flag} {target}: {_FORM}")
    try:
        found: object = getattr(importlib.import_module(module_name), class_name.strip(), None)
    except Exception as error:  # a module may raise anything
        raise ConfigError(
            f"{flag} {target}: {module_name} cannot be imported ({type(error).__name__}: {error})."
        ) from error
    if not all(callable(getattr(found, method, None)) for method in methods):
        raise ConfigError(f"{flag} {target}: {module_name} has no class {class_name} with {' and '.join(methods)}.")
    return found
