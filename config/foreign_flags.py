"""Command lines and keyword arguments of other engines: what each of their flags becomes here.

The tables are in `vllm_flags.py` and `peer_flags.py`. A flag is taken, under its own name or as a setting of ours; or
it is not needed, which is said in a sentence; or it is refused, because ignoring it would change answers.
"""

import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from ..errors import ConfigError
from .flags import SETTINGS

Settings = Mapping[str, object]
Convert = Callable[[object], "Settings | str"]
"""From a flag's value to settings of ours, or to the sentence that says why there are none. The value is text, True or
False of a switch, a list, or the object of a JSON flag. Raises ConfigError."""


class Taken(NamedTuple):
    """The flag means a setting of ours. `convert`: None if name and values are ours as well."""

    says: str = ""
    convert: Convert | None = None


class NotNeeded(NamedTuple):
    """The flag changes no answer here."""

    because: str


_NAMES_MODEL = ("--model", "--model-path", "--model_path", "-m", "--hf-repo")
MODEL = "MODEL"
"""Among the values of `Refused.unless`: the name of the model itself."""


class Refused(NamedTuple):
    """The flag would change answers, or what is protected. `unless`: values that ask for what is done anyway."""

    because: str
    unless: tuple[str, ...] = ()


Answer = Taken | NotNeeded | Refused


class Flag(NamedTuple):
    """One flag of another engine."""

    names: tuple[str, ...]  # the long one first
    kind: str  # "": a switch, which also has --no-…; "=": a value; "=+": several; "=?": one or none; "={}": JSON
    answer: Answer

    @property
    def name(self) -> str:
        return self.names[0]


def read_table(rows: Iterable[tuple[Answer, str]]) -> list[Flag]:
    """The flags of a table in its order. A row: an answer, and flags with that answer such as `--a|-b= --switch`."""
    flags = []
    for answer, specs in rows:
        for spec in specs.split():
            names, sign, rest = spec.partition("=")
            flags.append(Flag(tuple(names.split("|")), sign + rest, answer))
    return flags


def renamed(setting: str) -> Convert:
    """The value is that of a setting of ours."""
    return lambda value: {setting: value}


class Translated(NamedTuple):
    """Arguments of ours, and a sentence for each flag that went without effect."""

    arguments: list[str]
    notes: list[str]


def find(flags: Iterable[Flag]) -> dict[str, Flag]:
    """By each name; the first flag of a name counts."""
    found: dict[str, Flag] = {}
    for flag in flags:
        for name in flag.names:
            found.setdefault(name, flag)
    return found


def translate(argv: Sequence[str], flags: Mapping[str, Flag], aliases: Mapping[str, str]) -> Translated:
    """Replaces the flags of other engines in a command line by ours. `aliases`: flags that are keys of JSON flags. What
    is in no table stays as it is. Raises ConfigError for a flag that is refused."""
    arguments: list[str] = []
    notes: list[str] = []
    dotted: dict[str, dict[str, object]] = {}
    objects: dict[str, dict[str, object]] = {}  # settings to which several flags may add
    first: list[str] = []  # MODEL, which must not follow a flag of several values
    models = _models(argv)
    rest = [*argv]
    while rest:
        argument = rest.pop(0)
        if argument == "--":
            arguments += [argument, *rest]
            break
        if argument.startswith("-O") and argument[2:].isdigit():
            argument = f"-O={argument[2:]}"
        written, has_value, value = argument.partition("=")
        name = written.replace("_", "-") if written.startswith("--") else written
        name = aliases.get(name, name)
        head, dot, path = name.partition(".")
        flag, is_negated = flags.get(head), False
        if flag is None and name.startswith("--no-"):
            flag, is_negated = flags.get("--" + name.removeprefix("--no-")), True
        if flag is None or (is_negated and flag.kind):
            is_ours = name.startswith("--") and name.removeprefix("--").replace("-", "_") in SETTINGS
            arguments.append(name + has_value + value if is_ours else argument)
            continue
        given = _values(flag, written, value if has_value else None, rest, is_negated, bool(dot))
        if dot and flag.kind == "={}":
            _put(dotted.setdefault(flag.name, {}), path.split("."), str(given))
            continue
        settings = _answer(flag, written, given, notes, models)
        _move_objects(settings, objects)
        first += _arguments({"model": settings.pop("model")}) if "model" in settings else []
        arguments += _arguments(settings)
    for name, found in dotted.items():
        settings = _answer(flags[name], name, found, notes, models)
        _move_objects(settings, objects)
        arguments += _arguments(settings)
    arguments += _arguments(objects)
    return Translated([*first, *arguments], notes)


def _models(argv: Sequence[str]) -> list[str]:
    """The names that the command line gives the model."""
    words = [word for argument in argv for word in argument.split("=", 1)]
    named = [value for name, value in pairwise(words) if name in _NAMES_MODEL]
    return [*named, *(word for word in words[:1] if not word.startswith("-"))]


def translate_options(options: Settings, flags: Mapping[str, Flag]) -> tuple[dict[str, object], list[str]]:
    """Keyword arguments of another engine's Python class as settings of ours, and the sentences. What is in no table
    stays. None means: not given. Raises ConfigError."""
    settings: dict[str, object] = {}
    notes: list[str] = []
    for name, value in options.items():
        flag = flags.get("--" + name.replace("_", "-"))
        if flag is None or (isinstance(flag.answer, Taken) and flag.answer.convert is None):
            settings[name] = value
        elif value is not None and value != {} and value != []:
            settings |= _answer(flag, name, value, notes, ())
    return settings, notes


def _values(flag: Flag, written: str, value: str | None, rest: list[str], is_negated: bool, is_dotted: bool) -> object:
    """The value of a flag; takes what belongs to it from `rest`."""
    match flag.kind:
        case "":
            if value is not None and value.lower() not in ("true", "false"):
                raise ConfigError(f"{written} is a switch and takes no value.")
            return not is_negated if value is None else value.lower() == "true"
        case "=+" if value is None:
            several = []
            while rest and not rest[0].startswith("-"):
                several.append(rest.pop(0))
            return several
        case "=+":
            return [value]
        case "=?" if value is None:
            return rest.pop(0) if rest and not rest[0].startswith("-") else True
    if value is None:
        if not rest:
            raise ConfigError(f"{written} needs a value.")
        value = rest.pop(0)
    if flag.kind != "={}" or is_dotted:
        return value
    try:
        return json.loads(value)
    except ValueError as error:
        raise ConfigError(f"{written} needs JSON, not {value[:80]!r}.") from error


def _put(into: dict[str, object], path: list[str], value: str) -> None:
    for key in path[:-1]:
        inner = into.setdefault(key.replace("-", "_"), {})
        if not isinstance(inner, dict):
            return
        into = inner
    try:
        into[path[-1].rstrip("+").replace("-", "_")] = json.loads(value)
    except ValueError:
        into[path[-1].rstrip("+").replace("-", "_")] = value


def _answer(flag: Flag, written: str, value: object, notes: list[str], models: Collection[str]) -> dict[str, object]:
    """The settings of one flag. Adds to `notes` what is said about it. `models`: the model's names."""
    answer = flag.answer
    match answer:
        case Taken(convert=None):
            setting = SETTINGS[flag.name.removeprefix("--").replace("-", "_")]
            return {setting.name: value}
        case Taken(convert=convert):
            assert convert is not None
            try:
                found = convert(value)
            except ConfigError as error:
                raise ConfigError(f"{written} {_shown(value)}: {error}") from error
            if not isinstance(found, str):
                return dict(found)
            notes.append(f"{written}: {found}")
        case NotNeeded(because=because):
            notes.append(f"{written} is not needed: {because}")
        case Refused(because=because, unless=unless):
            is_done = str(value) in unless or (MODEL in unless and str(value) in models)
            if value is not False and value != {} and not is_done:
                raise ConfigError(f"{written} is not there: {because}")
    return {}


def _move_objects(settings: dict[str, object], objects: dict[str, dict[str, object]]) -> None:
    for name, value in [*settings.items()]:
        if isinstance(value, Mapping):
            objects.setdefault(name, {}).update(value)
            del settings[name]


def _arguments(settings: Settings) -> list[str]:
    found: list[str] = []
    for name, value in settings.items():
        flag = SETTINGS[name].flag if name in SETTINGS else f"--{name}"  # --config is no setting
        if name == "model":
            found.append(str(value))
        elif isinstance(value, bool):
            found.append(flag if value else f"--no-{flag.removeprefix('--')}")
        elif isinstance(value, list | tuple):
            found += [flag, *map(str, value)]
        elif isinstance(value, Mapping):
            found.append(f"{flag}={json.dumps(value)}")
        else:
            found.append(f"{flag}={value}")
    return found


def _shown(value: object) -> str:
    return (value if isinstance(value, str) else json.dumps(value, default=str))[:80]
