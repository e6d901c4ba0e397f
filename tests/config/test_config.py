"""The structs of the configuration, and helpers of the tests of this folder."""

import argparse
from types import UnionType
from typing import Literal, Union, get_args, get_origin, get_type_hints

import msgspec

from pagewire.config.config import (
    Config,
    EngineConfig,
    HttpConfig,
    MachineFacts,
    ModelFacts,
    ServerConfig,
)
from pagewire.config.flags import add_flags, read_flags
from pagewire.config.resolve import resolve
from pagewire.route.config import RouteConfig

MODEL = ModelFacts(
    path="/m", name="m", max_position=4096, vocab_size=100, eos_token_ids=(2,), checkpoint_dtype="float16"
)


def parse(*argv: str) -> Config:
    parser = argparse.ArgumentParser()
    add_flags(parser)
    return read_flags(parser.parse_args(argv))


def decide(config: Config, model: ModelFacts = MODEL) -> EngineConfig:
    return resolve(config, model, MachineFacts(num_cores=4))


def test_without_flags_the_config_is_the_default() -> None:
    assert parse() == Config()


def test_a_field_is_declared_in_one_struct() -> None:
    """The exception is `EngineConfig`, which narrows fields that it inherits from `EngineOptions`."""
    sections = [struct for struct in get_type_hints(Config).values() if issubclass(struct, msgspec.Struct)]
    given = [EngineConfig, HttpConfig, ServerConfig, RouteConfig, ModelFacts, MachineFacts]
    owner: dict[str, type[msgspec.Struct]] = {}
    for struct in (*sections, *given):
        hints = get_type_hints(struct)
        for name in struct.__annotations__:
            if hints[name] in (*sections, *given):
                continue  # a struct that is given to several processes
            first = owner.setdefault(name, struct)
            if first is not struct:
                assert issubclass(struct, first), f"{name}: {first.__name__}, {struct.__name__}"
                wide, narrow = choices(get_type_hints(first)[name]), choices(hints[name])
                assert narrow < wide, f"{name} is declared again and is not narrower"


def choices(kind: object) -> set[object]:
    """The types of a union and the values of its literals."""
    if isinstance(kind, UnionType) or get_origin(kind) in (Union, Literal):
        return {choice for part in get_args(kind) for choice in choices(part)}
    return {kind}


NO_COMPILER = {"has_compiler": False}
GPU = {"has_gpu": True}
