"""Families of models: a file turns the fields of its config.json into descriptions. No other file knows their names."""

import importlib
import pkgutil
from collections.abc import Mapping
from dataclasses import replace
from functools import cache

from ..description import Decoder, Head
from ..fields import Fields, NotDescribedError
from ..registry import PAGES, Page
from .wrappers import DEFAULTS


@cache
def pages() -> Mapping[str, Page]:
    """The pages of all families, by the name in config.json's `architectures`."""
    for module in pkgutil.iter_modules(__path__):
        importlib.import_module(f"{__name__}.{module.name}")
    return PAGES


def text_fields(c: Fields) -> Fields:
    """The fields of the text model: a wrapper with other inputs has them in an object of its own."""
    inner = c.part("text_config") or c.part("llm_config")
    if inner is None:
        return c
    types = {name: c.raw[name] for name in ("dtype", "torch_dtype") if name in c}
    tied = {name: c.raw[name] for name in ("tie_word_embeddings",) if name in c}  # the wrapper's heads are in question
    return Fields(DEFAULTS.get(inner.text("model_type", ""), {}) | types | inner.raw | tied, c.file)


def describe(architecture: str, c: Fields) -> Decoder:
    """c: of config.json. Raises NotDescribedError if there is no page or it does not cover the model, and ConfigError
    for fields that make no sense."""
    if architecture not in pages():
        raise NotDescribedError
    return pages()[architecture](text_fields(c))


def describe_body(architecture: str, c: Fields) -> Decoder:
    """The same for a model of which only the last hidden states are wanted: the file may have a head or not, and its
    names may be those of the class without a head. Raises NotDescribedError, ConfigError."""
    found = describe(architecture, c)
    if found.head.project is not None:
        raise NotDescribedError("a projection of its last hidden states")
    weights = [weight for weight in (found.head.weight, found.head.bias) if weight is not None]
    heads = [part for weight in weights for part in (*weight.parts, *weight.bias)]
    names = tuple(r"(.*\.)?" + part.name.removeprefix("/").replace(".", r"\.") for part in heads)
    prefixes = dict.fromkeys((*found.prefixes, *(prefix.removeprefix("model.") for prefix in found.prefixes)))
    return replace(found, head=Head(), prefixes=tuple(prefixes), ignored=(*found.ignored, *names))
