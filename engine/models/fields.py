"""Typed access to the fields of a config.json."""

from pathlib import Path

from ...errors import ConfigError

# Limits beyond any real model. Larger values would take hours or all memory before they failed.
MAX_SIZE = 2**24
MAX_LAYERS = 2**10
MAX_EXPERTS = 2**17  # in all layers together
MAX_POSITIONS = 2**27
_MAX_NUMBER = 1e12


class NotDescribedError(Exception):
    """A model that no page covers. The text says what its family's page does not cover; empty: there is no page."""

    @property
    def why(self) -> str:
        """A clause."""
        if not str(self):
            return "pagewire does not describe this family"
        return f"pagewire's description of this family does not cover {self}"


class Fields:
    """A JSON object. Errors are a ConfigError that names the file and the field. null counts as absent."""

    def __init__(self, raw: dict[str, object], file: Path) -> None:
        self.raw = raw
        self.file = file

    def __contains__(self, name: str) -> bool:
        return self.raw.get(name) is not None

    def size(self, *names: str, default: int | None = None, most: int = MAX_SIZE) -> int:
        """The positive integer under the first of `names` that is present. The default limit is for widths and
        counts."""
        for name in names:
            value = self.raw.get(name)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigError(f"{self.file} has {name} = {value!r}, which should be a positive whole number.")
            if value > most:
                raise ConfigError(f"{self.file} has {name} = {value}; the limit is {most}.")
            return value
        if default is None:
            raise ConfigError(f"{self.file} has no {names[0]}.")
        if default < 1:
            raise ConfigError(f"{self.file} has no {names[0]}, and its other sizes give {default}.")
        return default

    def count(self, name: str, default: int = 0) -> int:
        """A whole number that may be 0."""
        if name not in self:
            return default
        return 0 if self.raw[name] == 0 and self.raw[name] is not False else self.size(name)

    def number(self, name: str, default: float) -> float:
        """A positive number."""
        value = self.raw.get(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= _MAX_NUMBER:
            raise ConfigError(f"{self.file} has {name} = {value!r}, which should be a positive number.")
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        value = self.raw.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise ConfigError(f"{self.file} has {name} = {value!r}, which should be true or false.")
        return value

    def text(self, name: str, default: str) -> str:
        value = self.raw.get(name)
        if value is None:
            return default
        if not isinstance(value, str):
            raise ConfigError(f"{self.file} has {name} = {value!r}, which should be a text.")
        return value

    def ids(self, name: str) -> list[int]:
        """Token ids: a number, a list of numbers, or nothing."""
        value = self.raw.get(name)
        entries: list[object] = [] if value is None else value if isinstance(value, list) else [value]
        ids = [i for i in entries if isinstance(i, int) and not isinstance(i, bool)]
        if len(ids) < len(entries):
            raise ConfigError(f"{self.file} has {name} = {value!r}, which should be a token id or a list of them.")
        return [i for i in ids if i >= 0]  # -1 means "none" in some files

    def integers(self, name: str) -> tuple[int, ...] | None:
        """A list of whole numbers; None: absent."""
        value = self.raw.get(name)
        if value is None:
            return None
        if not isinstance(value, list) or not all(isinstance(i, int) and not isinstance(i, bool) for i in value):
            raise ConfigError(f"{self.file} has {name} = {value!r}, which should be a list of numbers.")
        return tuple(value)

    def numbers(self, name: str) -> tuple[float, ...] | None:
        """A list of positive numbers; None: absent."""
        value = self.raw.get(name)
        if value is None:
            return None
        entries: list[object] = value if isinstance(value, list) else [None]
        found = [float(i) for i in entries if isinstance(i, int | float) and not isinstance(i, bool) and i > 0]
        if len(found) < len(entries):
            raise ConfigError(f"{self.file} has {name} = {value!r}, which should be a list of positive numbers.")
        return tuple(found)

    def texts(self, name: str) -> tuple[str, ...] | None:
        """A list of texts; None: absent."""
        value = self.raw.get(name)
        if value is None:
            return None
        if not isinstance(value, list) or not all(isinstance(i, str) for i in value):
            raise ConfigError(f"{self.file} has {name} = {value!r}, which should be a list of texts.")
        return tuple(value)

    def part(self, name: str) -> "Fields | None":
        """An object within this one."""
        value = self.raw.get(name)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise ConfigError(f"{self.file} has {name} = {value!r}, which should be an object.")
        return Fields(value, self.file)

    def divided(self, what: str, number: int, by: str, divisor: int) -> int:
        """number / divisor, which must be whole."""
        if number % divisor:
            raise ConfigError(f"{self.file} has {number} {what}, no multiple of its {divisor} {by}.")
        return number // divisor
