"""Infilling: the model writes what belongs between two texts, whose places its own special tokens mark."""

from ...config.config import Infill
from ..http.http_error import unsupported


def infill_prompt(infill: Infill | None, before: str, after: str, *, field: str) -> str:
    """The prompt whose continuation belongs between `before` and `after`. `field`: that of the request which asks for
    it. Raises HttpError 400 if the model was not made for it."""
    if infill is None:
        raise unsupported(field, f"{field} is not supported: this model has no tokens for infilling.")
    parts = [infill.prefix + before, infill.suffix + after]
    return "".join(reversed(parts) if infill.is_suffix_first else parts) + infill.middle
