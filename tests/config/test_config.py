"""Flags, sizes and the pure function that decides the rest."""

import argparse

from pagewire.config.config import Config, EngineConfig, MachineFacts, ModelFacts
from pagewire.config.flags import add_flags, read_flags
from pagewire.config.resolve import resolve

MODEL = ModelFacts(path="/m", name="m", max_position=4096, vocab_size=100, eos_token_ids=(2,), dtype="float16")


def parse(*argv: str) -> Config:
    parser = argparse.ArgumentParser()
    add_flags(parser)
    return read_flags(parser.parse_args(argv))


def decide(config: Config, model: ModelFacts = MODEL) -> EngineConfig:
    return resolve(config, model, MachineFacts(num_cores=4))


def test_without_flags_it_is_the_default() -> None:
    assert parse() == Config()


NO_COMPILER = {"has_compiler": False}
GPU = {"has_gpu": True}
