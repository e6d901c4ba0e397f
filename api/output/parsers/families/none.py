"""Models whose tool calls are not read, and models that mark no reasoning."""

from ..family import Family

NONE = Family()
