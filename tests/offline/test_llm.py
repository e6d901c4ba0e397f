"""The offline API on a tiny random model: its results, and that it stays usable after a refused request."""

import dataclasses
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import checkpoints
import pytest
import torch
import vocabulary

from pagewire import LLM, RequestOutput, SamplingParams, StructuredOutputsParams
from pagewire.errors import ConfigError, RequestError
from pagewire.ipc.messages import Chunk

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    folder = tmp_path_factory.mktemp("llm")
    checkpoints.make_checkpoint(folder, "llama")
    vocabulary.add_tokenizer(folder)
    with LLM(str(folder), dtype="float32", threads=1, kv_cache_memory="32M") as llm:
        yield llm


def test_outputs_come_in_the_order_of_the_prompts(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    prompts = ["one", "a longer prompt that takes a little more", "x"]
    outputs = llm.generate(prompts, GREEDY)
    assert [o.prompt for o in outputs] == prompts and all(o.finished for o in outputs)
    assert [len(o.outputs[0].token_ids) for o in outputs] == [8, 8, 8]
    assert "generating" in capsys.readouterr().err  # the progress bar
    assert llm.generate(prompts[1], GREEDY, use_tqdm=False)[0].outputs == outputs[1].outputs


def test_a_prompt_as_text_or_as_ids_gives_the_same_output(llm: LLM) -> None:
    (text,) = llm.generate("hello", GREEDY, use_tqdm=False)
    (ids,) = llm.generate(text.prompt_token_ids, GREEDY, use_tqdm=False)
    assert ids.outputs == text.outputs and ids.prompt == "hello"


def test_each_prompt_may_have_its_own_parameters(llm: LLM) -> None:
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in (1, 5)]
    outputs = llm.generate(["a", "b"], params, use_tqdm=False)
    assert [len(o.outputs[0].token_ids) for o in outputs] == [1, 5]
    with pytest.raises(ValueError, match="2 prompts but 1"):
        llm.generate(["a", "b"], params[:1])


def test_lower_priority_values_run_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoints.make_checkpoint(tmp_path, "llama")
    vocabulary.add_tokenizer(tmp_path)
    ends: list[str] = []
    add = RequestOutput.add

    def spy(output: RequestOutput, index: int, chunk: Chunk) -> None:
        add(output, index, chunk)
        if output.finished:
            ends.append(output.request_id)

    monkeypatch.setattr(RequestOutput, "add", spy)
    options = {"scheduling_policy": "priority", "max_num_seqs": 1, "dtype": "float32", "kv_cache_memory": "32M"}
    with LLM(str(tmp_path), threads=1, **options) as llm:
        llm.generate(["a", "b", "c"], GREEDY, priority=[0, 5, -5], use_tqdm=False)
        assert ends == ["2", "0", "1"]
        with pytest.raises(ValueError, match="2 prompts but 1 priorities"):
            llm.generate(["a", "b"], GREEDY, priority=[1])


def test_a_seed_repeats_the_outputs_and_choices_differ(llm: LLM) -> None:
    params = SamplingParams(n=4, seed=3, temperature=1.5, max_tokens=12, ignore_eos=True)
    (first,) = llm.generate("hello", params, use_tqdm=False)
    many = llm.generate(["hello", *["other"] * 20], params, use_tqdm=False)
    assert first.outputs == many[0].outputs
    assert len({tuple(o.token_ids) for o in first.outputs}) > 1


def test_min_tokens_is_min_new_tokens_of_transformers(llm: LLM) -> None:
    model = checkpoints.load_reference(Path(llm._config.model.path))
    prompt = [5, 9, 3, 77, 41, 8]
    (free,) = llm.generate(prompt, GREEDY, use_tqdm=False)
    for eos in set(free.outputs[0].token_ids[:4]):
        model.generation_config.eos_token_id = eos
        for at_least in (0, 1, 3, 6):
            ids = torch.tensor([prompt])
            expected = model.generate(
                ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=12, min_new_tokens=at_least
            )[0, len(prompt) :].tolist()
            params = SamplingParams(
                temperature=0, max_tokens=12, min_tokens=at_least, stop_token_ids=[eos], ignore_eos=True
            )
            (output,) = llm.generate(prompt, params, use_tqdm=False)
            assert output.outputs[0].token_ids == expected and len(expected) >= at_least


def test_stop_strings_apply_only_after_min_tokens(llm: LLM) -> None:
    (free,) = llm.generate("hello", GREEDY, use_tqdm=False)
    ids = free.outputs[0].token_ids
    stops = {chr(id + 30) for id in ids if 3 <= id < 97}  # in this vocabulary id + 30 is the character
    assert len(stops) > 1, "the test needs printable tokens"
    for stop in stops:
        positions = [i for i, id in enumerate(ids, start=1) if id + 30 == ord(stop)]
        for at_least in range(len(ids)):
            params = SamplingParams(temperature=0, max_tokens=8, min_tokens=at_least, stop=stop, ignore_eos=True)
            (output,) = llm.generate("hello", params, use_tqdm=False)
            ends = [position for position in positions if position > at_least]
            assert len(output.outputs[0].token_ids) == (ends[0] if ends else len(ids)), (stop, at_least)
            assert output.outputs[0].stop_reason == (stop if ends else None)


@pytest.mark.parametrize(("keep", "left"), [(3, 3), (100, 20), (1, 1)])
def test_truncate_prompt_tokens_keeps_the_end_of_the_prompt(llm: LLM, keep: int, left: int) -> None:
    prompt = list(range(3, 23))
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, truncate_prompt_tokens=keep)
    (output,) = llm.generate(prompt, params, use_tqdm=False)
    (expected,) = llm.generate(prompt[-left:], GREEDY, use_tqdm=False)
    assert output.prompt_token_ids == prompt[-left:]
    assert output.outputs[0].token_ids == expected.outputs[0].token_ids[:4]


def test_truncate_prompt_tokens_minus_1_cuts_the_prompt_to_the_context(llm: LLM) -> None:
    prompt = [5] * (llm._config.max_model_len + 50)
    with pytest.raises(RequestError, match="maximum context length"):
        llm.generate(prompt, GREEDY, use_tqdm=False)
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, truncate_prompt_tokens=-1)
    (output,) = llm.generate(prompt, params, use_tqdm=False)
    assert len(output.prompt_token_ids) == llm._config.max_model_len - 8 and len(output.outputs[0].token_ids) == 8


def test_logprobs_of_output_and_prompt(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=3, logprobs=2, prompt_logprobs=1, ignore_eos=True)
    (output,) = llm.generate("hello", params, use_tqdm=False)
    completion = output.outputs[0]
    assert completion.logprobs is not None and len(completion.logprobs) == 3
    for token_id, candidates in zip(completion.token_ids, completion.logprobs, strict=True):
        assert candidates[token_id].rank == 1 and candidates[token_id].logprob == max(
            c.logprob for c in candidates.values()
        )
    assert output.prompt_logprobs is not None and len(output.prompt_logprobs) == 5
    assert output.prompt_logprobs[0] is None and output.prompt_token_ids[1] in (output.prompt_logprobs[1] or {})


def test_stop_strings_and_stop_tokens(llm: LLM) -> None:
    (free,) = llm.generate("hello", SamplingParams(temperature=0, max_tokens=20, ignore_eos=True), use_tqdm=False)
    ids = free.outputs[0].token_ids
    stop = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, stop_token_ids=[ids[4]])
    (by_id,) = llm.generate("hello", stop, use_tqdm=False)
    assert by_id.outputs[0].token_ids == ids[: ids.index(ids[4]) + 1]
    assert by_id.outputs[0].finish_reason == "stop" and by_id.outputs[0].stop_reason == ids[4]
    text = free.outputs[0].text
    piece = text[2:4]
    (by_text,) = llm.generate(
        "hello", SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, stop=piece), use_tqdm=False
    )
    assert by_text.outputs[0].text == text[: text.index(piece)] and by_text.outputs[0].stop_reason == piece


def test_a_refused_prompt_raises_and_leaves_no_request_or_block(llm: LLM) -> None:
    wrong: list[Any] = [["fine", "x" * 5000], [[1, 2], [99999]], [[]]]
    for prompts in wrong:
        with pytest.raises(RequestError):
            llm.generate(prompts, GREEDY, use_tqdm=False)
        assert llm._engine.scheduler.num_running == llm._engine.scheduler.num_waiting == 0
        assert llm._engine.scheduler.pool.num_held == 0
    assert llm.generate("fine", GREEDY, use_tqdm=False)[0].finished


def test_the_engine_serves_on_after_an_invalid_parameter(llm: LLM) -> None:
    with pytest.raises(ValueError, match="SamplingParams"):
        llm.generate(["a", "b"], [GREEDY, SamplingParams(temperature=-1)], use_tqdm=False)
    assert llm.generate("fine", GREEDY, use_tqdm=False)[0].finished


def test_chat_goes_through_the_template(llm: LLM) -> None:
    conversation = [{"role": "user", "content": "hi"}]
    (output,) = llm.chat(conversation, GREEDY, use_tqdm=False)
    assert output.prompt == "<s>user\nhi</s>\n<s>assistant\n"
    assert len(llm.chat([conversation, conversation], GREEDY, use_tqdm=False)) == 2


def test_structured_outputs_match_their_format(llm: LLM) -> None:
    """The weights are random and the temperature is 1, so only the constraint can give these formats."""
    schema = {
        "type": "object",
        "properties": {"n": {"enum": [1, 20]}},
        "required": ["n"],
        "additionalProperties": False,
    }
    cases: list[tuple[StructuredOutputsParams, Callable[[str], object]]] = [
        (StructuredOutputsParams(json=schema), lambda text: json.loads(text)["n"] in (1, 20)),
        (StructuredOutputsParams(json=json.dumps(schema)), lambda text: json.loads(text)["n"] in (1, 20)),
        (StructuredOutputsParams(regex="[ab]{3}"), lambda text: re.fullmatch("[ab]{3}", text)),
        (StructuredOutputsParams(choice=["yes", "no"]), lambda text: text in ("yes", "no")),
        (StructuredOutputsParams(grammar='start: "x" "y"+'), lambda text: re.fullmatch("xy+", text)),
    ]
    params = [SamplingParams(n=2, max_tokens=200, structured_outputs=wanted) for wanted, _ in cases]
    for result, (_, fits) in zip(llm.generate(["hello"] * len(cases), params, use_tqdm=False), cases, strict=True):
        assert all(fits(output.text) and output.finish_reason == "stop" for output in result.outputs), result
    chosen = SamplingParams(temperature=0, max_tokens=9, structured_outputs=StructuredOutputsParams(choice=["no"]))
    assert llm.chat([{"role": "user", "content": "hi"}], chosen, use_tqdm=False)[0].outputs[0].text == "no"
    with pytest.raises(RequestError, match="regular expression cannot be enforced"):
        llm.generate("x", SamplingParams(structured_outputs=StructuredOutputsParams(regex="(")), use_tqdm=False)
    with pytest.raises(ValueError, match="one of json"):
        llm.generate("x", SamplingParams(structured_outputs=StructuredOutputsParams()), use_tqdm=False)


def test_bad_words_are_not_generated(llm: LLM) -> None:
    (free,) = llm.generate("hello", GREEDY, use_tqdm=False)
    word = free.outputs[0].text[:2]
    bad = dataclasses.replace(GREEDY, bad_words=[word])
    (other,) = llm.generate("hello", bad, use_tqdm=False)
    assert not other.outputs[0].text.startswith(word) and len(other.outputs[0].token_ids) == 8


def test_max_tokens_0_scores_the_prompt(llm: LLM) -> None:
    (output,) = llm.generate("hello", SamplingParams(max_tokens=0, prompt_logprobs=0), use_tqdm=False)
    assert output.outputs[0].token_ids == [] and output.outputs[0].finish_reason == "length"
    assert output.prompt_logprobs is not None and len(output.prompt_logprobs) == 5


def test_invalid_options_are_refused() -> None:
    with pytest.raises(ConfigError, match="unknown field"):
        LLM("", nonsense=1)
    with pytest.raises(ConfigError, match=r"no folder \./nowhere"):
        LLM("./nowhere")
