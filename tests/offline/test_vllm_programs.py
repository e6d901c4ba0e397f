"""Programs in the shape of vLLM's offline examples, which run with `from pagewire import …` for `from vllm import …`.

Where vLLM is installed, `VLLM_MODEL=NAME pytest -W ignore -k 'shape or sleep' tests/offline/test_vllm_programs.py`
runs them with vLLM instead.
"""

import importlib
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import checkpoints
import pooling_checkpoints
import pytest
import vocabulary

_TITLE = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"], "additionalProperties": False}


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[ModuleType, Any]]:
    """A package and its LLM."""
    if name := os.environ.get("VLLM_MODEL"):
        package = importlib.import_module("vllm")
        yield package, package.LLM(model=name, enable_prefix_caching=True, seed=0, disable_log_stats=False)
        return
    folder: Path = tmp_path_factory.mktemp("programs")
    checkpoints.make_checkpoint(folder, "llama")
    vocabulary.add_tokenizer(folder)
    package = importlib.import_module("pagewire")
    options = {"trust_remote_code": True, "enforce_eager": True, "gpu_memory_utilization": 0.5, "max_num_seqs": 8}
    options["disable_log_stats"] = False
    with package.LLM(
        model=str(folder), tokenizer=str(folder), seed=0, dtype="float32", kv_cache_memory_bytes=2**25, **options
    ) as llm:
        yield package, llm


def basic(package: ModuleType, llm: Any) -> None:
    prompts = ["Hello, my name is", {"prompt": "The capital of France is"}, {"prompt_token_ids": [5, 6, 7]}]
    prompts.append(package.TokensPrompt(prompt_token_ids=[5, 6, 7]))
    outputs = llm.generate(prompts, package.SamplingParams(temperature=0.0, top_p=0.95, max_tokens=6))
    assert [output.prompt for output in outputs[:2]] == ["Hello, my name is", "The capital of France is"]
    assert outputs[2].outputs[0].text == outputs[3].outputs[0].text
    for output in outputs:
        assert output.finished and output.outputs[0].finish_reason in ("stop", "length")
        assert 1 <= len(output.outputs[0].token_ids) <= 6 and output.prompt_token_ids
    assert len(llm.generate("a")) == 1 and llm.get_default_sampling_params().max_tokens in (16, None)


def chat(package: ModuleType, llm: Any) -> None:
    conversation = [
        {"role": "system", "content": "You are a helpful assistant"},
        {"role": "user", "content": "Hello"},
    ]
    params = package.SamplingParams(temperature=0.5, max_tokens=5, seed=1)
    (one,) = llm.chat(conversation, params, use_tqdm=False)
    several = llm.chat([conversation] * 3, sampling_params=params, use_tqdm=True)
    assert [output.outputs[0].text for output in several] == [one.outputs[0].text] * 3
    template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    (other,) = llm.chat(conversation, params, use_tqdm=False, chat_template=template)
    assert other.prompt_token_ids != one.prompt_token_ids


def structured(package: ModuleType, llm: Any) -> None:
    from_params = (
        importlib.import_module(f"{package.__name__}.sampling_params") if package.__name__ == "vllm" else package
    )
    structure = from_params.StructuredOutputsParams
    for wanted, fits in (
        (structure(choice=["Positive", "Negative"]), lambda text: text in ("Positive", "Negative")),
        (structure(regex=r"[a-z]{1,9}@[a-z]{1,5}\.com"), lambda text: text.endswith(".com")),
        (structure(json=_TITLE), lambda text: json.loads(text)["n"] in (1, 2)),
    ):
        params = package.SamplingParams(structured_outputs=wanted, max_tokens=200, temperature=1.0, seed=1)
        text = llm.generate("Classify: it is wonderful!", params, use_tqdm=False)[0].outputs[0].text
        assert fits(text), text


def prefix_caching(package: ModuleType, llm: Any) -> None:
    prefix = "You are an expert school principal, skilled in managing faculty and staff. " * 3
    params = package.SamplingParams(temperature=0.0, max_tokens=4)
    prompts = [prefix + question for question in ("Who are you?", "Draft questions.", "And then?")]
    llm.generate(prompts[0], params, use_tqdm=False)
    before = counters(llm)
    outputs = llm.generate(prompts, params, use_tqdm=False)
    after = counters(llm)
    assert all(output.num_cached_tokens > 0 for output in outputs)
    hits = "vllm:prefix_cache_hits"
    assert after[hits] - before[hits] == sum(output.num_cached_tokens for output in outputs)


def counters(llm: Any) -> dict[str, int]:
    return {metric.name: metric.value for metric in llm.get_metrics() if type(metric).__name__ == "Counter"}


def engine_loop(package: ModuleType, llm: Any) -> None:
    kinds = importlib.import_module("vllm.sampling_params") if package.__name__ == "vllm" else package
    last = kinds.RequestOutputKind.FINAL_ONLY  # else vLLM's outputs have only the choices that are new
    waiting = [
        ("A robot may not injure a human being", package.SamplingParams(temperature=0.0, logprobs=1, max_tokens=5)),
        ("To be or not to be,", package.SamplingParams(temperature=0.8, top_k=5, presence_penalty=0.2, max_tokens=5)),
        ("What is the meaning of life?", package.SamplingParams(n=2, top_p=0.95, max_tokens=5, output_kind=last)),
    ]
    engine, request_id, finished = llm.llm_engine, 0, []
    while waiting or engine.has_unfinished_requests():
        if waiting:
            prompt, params = waiting.pop(0)
            engine.add_request(str(request_id), prompt, params)
            request_id += 1
        finished += [output for output in engine.step() if output.finished]
    assert sorted(output.request_id for output in finished) == ["0", "1", "2"]
    assert sorted(len(output.outputs) for output in finished) == [1, 1, 2]


def beams(package: ModuleType, llm: Any) -> None:
    kind = importlib.import_module(
        "vllm.sampling_params" if package.__name__ == "vllm" else "pagewire"
    ).BeamSearchParams
    (output,) = llm.beam_search([{"prompt": "Hello"}], kind(beam_width=2, max_tokens=4))
    assert len(output.sequences) == 2 and output.sequences[0].cum_logprob >= output.sequences[1].cum_logprob


@pytest.mark.parametrize("program", [basic, chat, structured, prefix_caching, engine_loop, beams])
def test_a_program_in_the_shape_of_vllms_examples(
    engine: tuple[ModuleType, Any], program: Callable[[ModuleType, Any], None]
) -> None:
    program(*engine)


def test_sleep_and_wake(engine: tuple[ModuleType, Any]) -> None:
    package, llm = engine
    params = package.SamplingParams(temperature=0.0, max_tokens=4)
    before = llm.generate("Hello", params, use_tqdm=False)
    llm.sleep(level=1)
    llm.wake_up()
    assert llm.generate("Hello", params, use_tqdm=False)[0].outputs == before[0].outputs


def test_embeddings_and_scores(tmp_path: Path) -> None:
    """Programs for models of vectors and scores."""
    from pagewire import LLM, PoolingParams

    folder = pooling_checkpoints.make_encoder(tmp_path / "e", "bert", pooling="mean", normalize=True)
    llm = LLM(model=str(folder), runner="pooling", dtype="float32", threads=1)
    outputs = llm.embed(["the cat", "a dog"], use_tqdm=False)
    assert len(outputs) == 2 and len(outputs[0].outputs.embedding) == llm._config.model.purpose.size
    (raw,) = llm.embed("the cat", pooling_params=PoolingParams(use_activation=False), use_tqdm=False)
    length = sum(x * x for x in raw.outputs.embedding) ** 0.5
    assert [x / length for x in raw.outputs.embedding] == pytest.approx(outputs[0].outputs.embedding) and length != 1
    (tokens,) = llm.encode("the cat", pooling_task="token_embed", use_tqdm=False)
    assert tokens.outputs.data.shape == (len(tokens.prompt_token_ids), llm._config.model.purpose.size)
    (whole,) = llm.encode("the cat", pooling_task="embed", use_tqdm=False)
    assert whole.outputs.data.tolist() == outputs[0].outputs.embedding

    folder = pooling_checkpoints.make_cross_encoder(tmp_path / "c")
    ranker = LLM(model=str(folder), dtype="float32", threads=1)
    (first, second) = ranker.score("capital of france", ["paris", "dog"], use_tqdm=False)
    assert first.outputs.score != second.outputs.score
    (label,) = ranker.classify("paris is a city", use_tqdm=False)
    assert len(label.outputs.probs) == 1 and 0 <= label.outputs.probs[0] <= 1


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        (
            {"logits_processors": [print]},
            "logits_processors is not there: no functions of the caller run in the worker",
        ),
        ({"logprob_token_ids": [1]}, "logprob_token_ids is not there: "),
        ({"repetition_detection": {"min_count": 2}}, "repetition_detection is not there: "),
        ({"flat_logprobs": True}, "flat_logprobs is not there: "),
        ({"thinking_token_budget": 5}, "thinking_token_budget is for chats with a model whose reasoning is known."),
    ],
)
def test_parameters_that_are_not_there(
    engine: tuple[ModuleType, Any], fields: dict[str, object], sentence: str
) -> None:
    package, llm = engine
    if package.__name__ == "pagewire":
        with pytest.raises(ValueError, match=f"^SamplingParams: {sentence}"):
            llm.generate("a", package.SamplingParams(**fields), use_tqdm=False)
        with pytest.raises(ValueError, match="lora_request is not there"):
            llm.generate("a", lora_request=object())
        with pytest.raises(ValueError, match="StructuredOutputsParams: whitespace_pattern is not there"):
            structure = package.StructuredOutputsParams(json={}, whitespace_pattern=" ")
            llm.generate("a", package.SamplingParams(structured_outputs=structure), use_tqdm=False)
