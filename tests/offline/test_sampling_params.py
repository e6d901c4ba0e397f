"""Sampling parameters out of bounds."""

from collections.abc import Iterator
from typing import Any

import checkpoints
import pytest
import vocabulary

from pagewire import LLM, SamplingParams
from pagewire.errors import RequestError


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    folder = tmp_path_factory.mktemp("llm")
    checkpoints.make_checkpoint(folder, "llama")
    vocabulary.add_tokenizer(folder)
    with LLM(str(folder), dtype="float32", threads=1, kv_cache_memory="32M") as llm:
        yield llm


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"min_tokens": 9, "max_tokens": 8}, "min_tokens"),
        ({"min_tokens": -1}, "min_tokens: Expected `int` >= 0"),
        ({"logit_bias": {-1: 1.0}}, "logit_bias must map"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"allowed_token_ids": [checkpoints.VOCAB_SIZE]}, "allowed_token_ids"),
        ({"min_tokens": 1, "stop_token_ids": list(range(320)) * 3, "logit_bias": {}}, None),
    ],
)
def test_bounds_of_less_common_parameters(llm: LLM, fields: dict[str, Any], words: str | None) -> None:
    params = SamplingParams(**{"temperature": 0, "max_tokens": 2, **fields})
    if words is None:
        (output,) = llm.generate([5, 6], params, use_tqdm=False)
        assert len(output.outputs[0].token_ids) == 1, "all tokens are end tokens, so the first one ends it"
        return
    with pytest.raises((RequestError, ValueError), match=words):
        llm.generate([5, 6], params, use_tqdm=False)


@pytest.mark.parametrize(
    "wrong", [{"temperature": -1}, {"top_p": 0}, {"n": 0}, {"logprobs": 50}, {"max_tokens": -1}, {"min_p": 2}]
)
def test_parameters_out_of_bounds_are_named(llm: LLM, wrong: dict[str, int]) -> None:
    (name,) = wrong
    with pytest.raises(ValueError, match=f"SamplingParams: {name}: "):
        llm.generate("x", SamplingParams(**wrong), use_tqdm=False)  # type: ignore[arg-type]
