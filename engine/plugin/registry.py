"""Finds the class behind `--runner-plugin`, which has torch and so is imported by workers only."""

from ...config.plugins import find_class, split_spec
from ...errors import ConfigError
from .base import API_VERSION, RunnerPlugin

FLAG = "--runner-plugin"


def load_plugin(spec: str) -> RunnerPlugin:
    """Makes the plugin of `module:Class,option=value,…`. Raises ConfigError."""
    name, options = split_spec(FLAG, spec)
    found = find_class(FLAG, name, ())
    if not isinstance(found, type) or not issubclass(found, RunnerPlugin):
        raise ConfigError(f"{FLAG} {name}: it must be a subclass of pagewire.RunnerPlugin.")
    version: object = getattr(found, "api_version", None)
    if version is None:
        raise ConfigError(f"{FLAG} {name}: set api_version = {API_VERSION}, the interface that this engine has.")
    if version != API_VERSION:
        raise ConfigError(
            f"{FLAG} {name} is for version {version!r} of the plugins' interface, and this engine has {API_VERSION}."
        )
    if found.shared_kv not in ("all", "equal args", "none"):
        raise ConfigError(f"{FLAG} {name}: shared_kv must be all, equal args or none, not {found.shared_kv!r}.")
    return found(options)
