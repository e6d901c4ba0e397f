"""From what a person says to what every process receives: find the checkpoint, read its config, decide the rest."""

from .config import Config, EngineConfig, machine_facts, resolve
from .engine.models.spec import model_facts, read_spec
from .engine.weights.source import locate


def prepare(config: Config) -> EngineConfig:
    """Downloads the model if need be. Raises ConfigError."""
    folder, name = locate(config.model, config.revision)
    return resolve(config, model_facts(read_spec(folder), folder, name), machine_facts())
