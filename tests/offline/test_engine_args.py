"""vLLM's arguments of engines in Python."""

import argparse
import logging

import pytest

from pagewire import LLM, AsyncEngineArgs, EngineArgs
from pagewire.errors import ConfigError


def test_arguments_of_vllm_become_settings(caplog: pytest.LogCaptureFixture) -> None:
    arguments = EngineArgs(
        model="m", tokenizer="m", trust_remote_code=True, dtype="half", tensor_parallel_size=2, max_num_seqs=4, seed=3
    )
    with caplog.at_level(logging.WARNING):
        config = arguments.config({"pipeline_depth": 1})
    assert [record.getMessage().partition(":")[0] for record in caplog.records] == ["EngineArgs"]
    assert "trust_remote_code is not needed: " in caplog.text and arguments.seed == 3
    assert config.source.model == "m" and config.engine.dtype == "float16" and config.engine.max_num_seqs == 4
    assert config.engine.tensor_parallel_size == 2 and config.engine.pipeline_depth == 1


def test_what_would_change_answers_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^hf_overrides is not there: set the fields in"):
        LLM("m", hf_overrides={"a": 1})
    with pytest.raises(ConfigError, match=r"^LLM: tokenizer: the tokenizer in the model's folder is used"):
        LLM("m", tokenizer="other")
    with pytest.raises(ConfigError, match=r"^AsyncEngineArgs: Object contains unknown field `nonsense`"):
        AsyncEngineArgs("m", nonsense=1).config()


def test_flags_of_a_program_become_arguments() -> None:
    parser = EngineArgs.add_cli_args(argparse.ArgumentParser())
    parsed = parser.parse_args(["--model", "m", "-tp", "2", "--enforce-eager", "--seed", "5", "--max-model-len", "1k"])
    arguments = EngineArgs.from_cli_args(parsed)
    config = arguments.config()
    assert arguments.seed == 5 and config.source.model == "m" and config.engine.max_model_len == 1024
    assert config.engine.tensor_parallel_size == 2
