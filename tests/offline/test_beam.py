"""Beam search: the beams of transformers, computed as forks of one prefilled sequence."""

from pathlib import Path
from typing import Any, cast

import checkpoints
import pytest
import torch
import vocabulary
from msgspec.structs import replace
from transformers import AutoModelForCausalLM

from pagewire import LLM, BeamSearchParams
from pagewire.api.output.beam_search import BeamSearch

PROMPTS = [[5, 9, 3, 77, 41, 8], list(range(3, 40))]
LENGTH = 20


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("beam")
    checkpoints.make_checkpoint(folder, "llama")
    vocabulary.add_tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def llm(folder: Path) -> LLM:
    return LLM(str(folder), dtype="float32", threads=1, kv_cache_memory="32M")


def test_the_beams_are_those_of_transformers(folder: Path, llm: LLM) -> None:
    outputs = llm.beam_search(PROMPTS, BeamSearchParams(beam_width=4, max_tokens=LENGTH, ignore_eos=True))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        with torch.inference_mode():
            expected = model.generate(
                torch.tensor([prompt]),
                attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
                num_beams=4,
                num_return_sequences=4,
                do_sample=False,
                max_new_tokens=LENGTH,
                pad_token_id=0,
            )
        assert [beam.tokens for beam in output.sequences] == expected.tolist()
        assert all(beam.finish_reason == "length" and beam.text for beam in output.sequences)


def test_beams_share_the_kv_of_their_parents(llm: LLM) -> None:
    counters = llm._engine.scheduler.counters
    prompt, before = list(range(60, 110)), counters.num_prompt_tokens - counters.num_cached_tokens
    llm.beam_search(prompt, BeamSearchParams(beam_width=3, max_tokens=10, ignore_eos=True))
    computed = counters.num_prompt_tokens - counters.num_cached_tokens - before
    assert computed == len(prompt) + 9 * 3, "after the prompt, each beam computes one position a step"
    assert llm._engine.scheduler.pool.num_held == 0


def test_beams_end_at_the_maximum_context_length(llm: LLM) -> None:
    longest = llm._engine.scheduler.max_model_len
    (output,) = llm.beam_search([5] * (longest - 3), BeamSearchParams(beam_width=2, max_tokens=9, ignore_eos=True))
    assert [len(beam.tokens) for beam in output.sequences] == [longest, longest]
    assert all(beam.finish_reason == "length" for beam in output.sequences)


def test_early_stopping_stops_once_beam_width_beams_have_ended() -> None:
    params = BeamSearchParams(beam_width=2, max_tokens=9, early_stopping=True)
    search = BeamSearch([1], params, frozenset({0}))
    search.take([{0: -1.0, 5: -0.1, 6: -0.2}])
    assert search.prompts == [[1, 5], [1, 6]], "only one of two beams has ended"
    search.take([{0: -0.5, 7: -0.1}, {7: -3.0}])
    assert search.prompts == []
    assert [(beam.tokens, beam.finish_reason) for beam in search.output().sequences] == [
        ([1, 5, 7], "length"),
        ([1, 5, 0], "stop"),
    ]


def test_an_eos_ends_a_beam(folder: Path, llm: LLM) -> None:
    plain = llm.beam_search(PROMPTS[0], BeamSearchParams(beam_width=2, max_tokens=6, ignore_eos=True))[0]
    eos = plain.sequences[0].tokens[len(PROMPTS[0]) + 2]
    ending = LLM(str(folder), dtype="float32", threads=1, kv_cache_memory="32M")
    ending._config = replace(ending._config, model=replace(ending._config.model, eos_token_ids=(eos,)))
    (output,) = ending.beam_search(PROMPTS[0], BeamSearchParams(beam_width=2, max_tokens=6, length_penalty=0.0))
    assert any(b.finish_reason == "stop" and b.tokens[-1] == eos for b in output.sequences)
    assert all(eos not in b.tokens[len(PROMPTS[0]) : -1] for b in output.sequences)


@pytest.mark.parametrize("wrong", [{"beam_width": 0}, {"beam_width": 11}, {"max_tokens": 0}])
def test_invalid_parameters_are_refused(llm: LLM, wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="beam_width"):
        llm.beam_search([1, 2], BeamSearchParams(**cast(dict[str, Any], {"beam_width": 2, "max_tokens": 2} | wrong)))
