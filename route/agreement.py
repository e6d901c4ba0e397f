"""Whether the engines that serve a model agree on it: on its files, its longest context, pagewire's version, and on KV
that travels between them.

A request may go to any of them, and a stream may continue on another one. The router compares what engines say in
/load; what an engine that is away has said last still counts, so that a restart is no news.
"""

import logging
from collections.abc import Mapping, Sequence

from msgspec import Struct

log = logging.getLogger("pagewire.route")
_MOST_NAMED = 3  # engines in one line of the log
_SHOWN = 12  # digits of a digest


class Offer(Struct, frozen=True):
    """What an engine says of one model. Empty or 0: it does not say."""

    files_digest: str  # hex; equal for equal files
    max_model_len: int  # tokens
    version: str  # of pagewire
    kv_digest: str = ""  # hex; KV travels only between engines with equal ones; empty: the router has none travel

    @property
    def traits(self) -> dict[str, str]:
        """What is compared, by its name in a sentence."""
        said = {
            "files_digest": self.files_digest[:_SHOWN],
            "max_model_len": str(self.max_model_len or ""),
            "pagewire version": self.version,
            "kv_digest": self.kv_digest[:_SHOWN],
        }
        return {trait: value for trait, value in said.items() if value}


class Server(Struct, frozen=True):
    """One engine, with what it says of each model by name."""

    url: str
    offers: Mapping[str, Offer]


class Agreement:
    """Says once when engines differ, and once when they no longer do."""

    def __init__(self) -> None:
        # What has been said: the values of a trait that differ, by (model, trait).
        self._told: dict[tuple[str, str], frozenset[str]] = {}

    def compare(self, servers: Sequence[Server]) -> dict[str, str]:
        """Logs what is new. URL → a sentence, of each engine that differs from most of those that serve its model."""
        found = _differences(servers)
        told = {key: frozenset(value for value, _ in by_value) for key, by_value in found.items()}
        news = {key: by_value for key, by_value in found.items() if self._told.get(key) != told[key]}
        for (trait, by_value), models in _alike(news).items():
            each = ", ".join(f"{value} ({_some(urls)})" for value, urls in by_value)
            log.warning("the engines of %s differ in their %s: %s", models, trait, each)
        for (trait, _), models in _alike({key: () for key in self._told if key not in found}).items():
            log.warning("the engines of %s no longer differ in their %s", models, trait)
        self._told = told
        warnings: dict[str, list[str]] = {}
        for (trait, by_value), models in _alike(found).items():
            (usual, (witness, *_)), *others = by_value
            for value, url in [(value, url) for value, urls in others for url in urls]:
                sentence = f"It serves {models} with {trait} {value}, and {witness} with {usual}."
                warnings.setdefault(url, []).append(sentence)
        return {url: " ".join(sentences) for url, sentences in warnings.items()}


_ByValue = tuple[tuple[str, tuple[str, ...]], ...]
"""The values of a trait, each with the URLs of its engines, the commonest first."""


def _differences(servers: Sequence[Server]) -> dict[tuple[str, str], _ByValue]:
    """By (model, trait), of each trait with several values."""
    urls_of: dict[tuple[str, str], dict[str, list[str]]] = {}
    for server in servers:
        for model, offer in server.offers.items():
            for trait, value in offer.traits.items():
                urls_of.setdefault((model, trait), {}).setdefault(value, []).append(server.url)
    return {
        key: tuple((value, tuple(urls)) for value, urls in sorted(by_value.items(), key=lambda item: -len(item[1])))
        for key, by_value in urls_of.items()
        if len(by_value) > 1
    }


def _alike(differences: Mapping[tuple[str, str], _ByValue]) -> dict[tuple[str, _ByValue], str]:
    """The models that share a sentence, joined, by (trait, its values)."""
    models: dict[tuple[str, _ByValue], list[str]] = {}
    for (model, trait), by_value in differences.items():
        models.setdefault((trait, by_value), []).append(model)
    return {key: ", ".join(names) for key, names in models.items()}


def _some(urls: Sequence[str]) -> str:
    more = len(urls) - _MOST_NAMED
    return ", ".join(urls[:_MOST_NAMED]) + (f" and {more} more" if more > 0 else "")
