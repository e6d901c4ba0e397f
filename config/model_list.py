"""Several models behind one port: which they are, and how each is served. From `--models` and several MODELs."""

import math
from collections.abc import Sequence
from pathlib import Path

import msgspec
from msgspec import Struct

from ..errors import ConfigError
from .config import Config
from .flags import SETTINGS, from_options, read_toml

MAX_MODELS = 64
_SECTIONS = ("source", "engine", "cpu")  # whose settings a model may have of its own
_OWN = ("pinned", "keep_alive", "system_prompt")
_CONFIGS = ("config.json", "adapter_config.json")  # a folder with one of them is a model
_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}


class ModelEntry(Struct, frozen=True, kw_only=True):
    """One of the models."""

    config: Config  # of its engine
    is_pinned: bool = False  # loaded at the start, and never unloaded
    keep_alive_s: float = math.inf  # it is unloaded when nobody has used it for so long
    system_prompt: str = ""  # of conversations that have none
    where: str = ""  # for errors: what named it


def read_models(config: Config) -> tuple[ModelEntry, ...]:
    """The models of `models`, with the other settings of `config` where they have none of their own. Raises
    ConfigError, with a sentence for each entry that is wrong."""
    if config.source.served_model_name:
        raise ConfigError("--served-model-name is for one model: name each of several in the file of --models.")
    base = msgspec.structs.replace(config, source=msgspec.structs.replace(config.source, models=()))
    entries: list[ModelEntry] = []
    for name in config.source.models:
        path = Path(name)
        if path.suffix == ".toml":
            entries += _of_file(path, base)
        elif path.is_dir() and not _is_model(path):
            entries += _of_folder(path, base)
        else:
            entries.append(_entry({"model": name}, base, name))
    if len(entries) > MAX_MODELS:
        raise ConfigError(f"--models names {len(entries)} models; {MAX_MODELS} are possible.")
    return tuple(entries)


def parse_keep_alive(value: object) -> float:
    """Seconds: a number, or a text such as "5m", "1h30m" or "-1" as Ollama's clients write it; negative: inf. Raises
    ValueError."""
    seconds = _seconds(value) if isinstance(value, str) else value
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or math.isnan(seconds):
        raise ValueError
    return math.inf if seconds < 0 else float(seconds)


def _seconds(text: str) -> float:
    sign, rest, total = 1.0, text.strip().lower(), 0.0
    if rest.startswith("-"):
        sign, rest = -1.0, rest[1:]
    if rest[-1:].isdigit():
        return sign * float(rest)
    while rest:
        digits = len(rest) - len(rest.lstrip("0123456789."))
        unit = next((unit for unit in _UNITS if rest[digits:].startswith(unit)), "")
        total += float(rest[:digits]) * _UNITS.get(unit, math.nan)
        rest = rest[digits + len(unit) :] if unit else ""
    return sign * total if text.strip() else math.nan


def _is_model(folder: Path) -> bool:
    return any((folder / name).is_file() for name in _CONFIGS)


def _of_folder(folder: Path, base: Config) -> list[ModelEntry]:
    files = sorted(folder.iterdir())
    found = [path for path in files if (path.is_dir() and _is_model(path)) or path.suffix == ".gguf"]
    if not found:
        raise ConfigError(f"--models {folder}: it is no model, and none of its folders has a config.json.")
    return [_entry({"model": str(path)}, base, str(path)) for path in found]


def _of_file(path: Path, base: Config) -> list[ModelEntry]:
    found = read_toml("--models", path)
    tables = found.get("models")
    if found.keys() != {"models"} or not isinstance(tables, list) or not tables:
        raise ConfigError(f"--models {path} must have a [[models]] table for each model, and nothing else.")
    entries, problems = [], []
    for number, table in enumerate(tables, 1):
        where = f"{path}, model {number}"
        try:
            if not isinstance(table, dict):
                raise ConfigError(f"--models {where}: it must be a table.")
            settings = {str(name).replace("-", "_"): value for name, value in table.items()}
            name = settings.get("model")
            if not isinstance(name, str) or not name:
                raise ConfigError(f"--models {where}: model is missing.")
            if (beside := path.parent / name).exists():
                settings["model"] = str(beside)
            entries.append(_entry(settings, base, where))
        except ConfigError as error:
            problems.append(str(error))
    _raise(problems)
    return entries


def _raise(problems: Sequence[str]) -> None:
    if problems:
        raise ConfigError(" ".join(problems))


def _entry(settings: dict[str, object], base: Config, where: str) -> ModelEntry:
    own = {name: settings.pop(name) for name in _OWN if name in settings}
    for name in settings:
        if name not in SETTINGS or SETTINGS[name].section not in _SECTIONS or name == "models":
            raise ConfigError(f"--models {where}: {name} is no setting of a model.")
    if isinstance(settings.get("served_model_name"), str):
        settings["served_model_name"] = [settings["served_model_name"]]
    is_pinned, system_prompt = own.get("pinned", False), own.get("system_prompt", "")
    if not isinstance(is_pinned, bool):
        raise ConfigError(f"--models {where}: pinned must be true or false.")
    if not isinstance(system_prompt, str):
        raise ConfigError(f"--models {where}: system_prompt must be a text.")
    try:
        keep_alive_s = parse_keep_alive(own.get("keep_alive", -1))
    except ValueError:
        raise ConfigError(f'--models {where}: keep_alive must be seconds, or a time such as "5m".') from None
    return ModelEntry(
        config=from_options(f"--models {where}", settings, base=base),
        is_pinned=is_pinned,
        keep_alive_s=keep_alive_s,
        system_prompt=system_prompt,
        where=where,
    )
