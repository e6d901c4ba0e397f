"""The engine whose caller runs each step."""

from collections.abc import Iterator
from pathlib import Path

import checkpoints
import pytest
import vocabulary

from pagewire import LLM, EngineArgs, LLMEngine, PoolingParams, RequestOutput, RequestOutputKind, SamplingParams
from pagewire.errors import RequestError
from pagewire.offline.pooled import PoolingRequestOutput


def greedy(**fields: object) -> SamplingParams:
    return SamplingParams(**{"temperature": 0, "max_tokens": 8, "ignore_eos": True, **fields})  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    folder: Path = tmp_path_factory.mktemp("engine")
    checkpoints.make_checkpoint(folder, "llama")
    vocabulary.add_tokenizer(folder)
    with LLM(str(folder), dtype="float32", threads=1, kv_cache_memory="32M") as llm:
        yield llm


@pytest.fixture
def engine(llm: LLM) -> Iterator[LLMEngine]:
    yield llm.llm_engine
    assert not llm.llm_engine.has_unfinished_requests()
    assert llm._engine.scheduler.num_running == llm._engine.scheduler.num_waiting == 0
    assert llm._engine.scheduler.pool.num_held == 0


def run(engine: LLMEngine) -> dict[str, list[RequestOutput]]:
    """The outputs of all steps, by request."""
    found: dict[str, list[RequestOutput]] = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            assert isinstance(output, RequestOutput)
            found.setdefault(output.request_id, []).append(output)
    return found


def test_steps_return_all_output_so_far(engine: LLMEngine, llm: LLM) -> None:
    prompts = ["hello", "a longer prompt that takes more", "x"]
    expected = llm.generate(prompts, greedy(), use_tqdm=False)
    for i, prompt in enumerate(prompts):
        assert engine.add_request(f"r{i}", prompt, greedy()) == f"r{i}"
    assert engine.get_num_unfinished_requests() == 3
    found = run(engine)
    for i, one in enumerate(expected):
        steps = found[f"r{i}"]
        assert steps[-1].outputs == one.outputs and steps[-1].prompt_token_ids == one.prompt_token_ids
        assert [output.finished for output in steps] == [False] * (len(steps) - 1) + [True]
        lengths = [len(output.outputs[0].token_ids) for output in steps]
        assert lengths == list(range(1, 9)), "a step computes one token"
        assert all(one.outputs[0].text.startswith(output.outputs[0].text) for output in steps)


def test_requests_join_while_others_run(engine: LLMEngine, llm: LLM) -> None:
    (first, second) = llm.generate(["hello", "later"], greedy(), use_tqdm=False)
    engine.add_request("a", "hello", greedy())
    early = [engine.step()[0].request_id for _ in range(3)]
    engine.add_request("b", {"prompt": "later"}, greedy())
    found = run(engine)
    assert early == ["a"] * 3 and found["a"][-1].outputs == first.outputs and found["b"][-1].outputs == second.outputs


@pytest.mark.parametrize("n", [1, 3])
def test_deltas_add_up_and_final_only_is_silent_before_the_end(engine: LLMEngine, n: int) -> None:
    params = {"n": n, "seed": 7, "temperature": 1.2, "max_tokens": 9, "logprobs": 1}
    engine.add_request("all", "hello", greedy(**params))
    engine.add_request("delta", "hello", greedy(output_kind=RequestOutputKind.DELTA, **params))
    engine.add_request("final", "hello", greedy(output_kind=RequestOutputKind.FINAL_ONLY, **params))
    found = run(engine)
    assert len(found["final"]) == 1 and found["final"][0].outputs == found["all"][-1].outputs
    for expected in found["final"][0].outputs:
        parts = [one for output in found["delta"] for one in output.outputs if one.index == expected.index]
        assert "".join(part.text for part in parts) == expected.text
        assert [id for part in parts for id in part.token_ids] == expected.token_ids
        assert [one for part in parts for one in part.logprobs or []] == expected.logprobs
        assert [part.finish_reason for part in parts if part.finish_reason] == [expected.finish_reason]


def test_an_aborted_request_is_never_returned_and_frees_its_blocks(engine: LLMEngine) -> None:
    engine.add_request("a", "hello", greedy(max_tokens=100))
    engine.add_request("b", "other", greedy(n=2, max_tokens=100))
    assert {output.request_id for output in engine.step()} | {output.request_id for output in engine.step()} == {
        "a",
        "b",
    }
    engine.abort_request(["b", "nobody"])
    assert {output.request_id for output in engine.step()} == {"a"} and engine.get_num_unfinished_requests() == 1
    engine.abort_request("a")
    assert engine.step() == []


def test_a_refused_request_raises_when_it_is_added(engine: LLMEngine) -> None:
    engine.add_request("a", "hello", greedy())
    with pytest.raises(RequestError, match="maximum context length"):
        engine.add_request("long", "x" * 5000, greedy())
    with pytest.raises(ValueError, match="'a' is in use"):
        engine.add_request("a", "hello", greedy())
    with pytest.raises(ValueError, match="SamplingParams: "):
        engine.add_request("b", "hello", greedy(top_p=2.0))
    assert [*run(engine)] == ["a"]
    engine.add_request("a", "hello", greedy(max_tokens=1))
    assert len(run(engine)["a"]) == 1


def test_a_pooling_request_gives_its_vector(engine: LLMEngine, llm: LLM) -> None:
    engine.add_request("v", "hello", PoolingParams(dimensions=4))
    (output,) = engine.step()
    (expected,) = llm.embed("hello", dimensions=4, use_tqdm=False)
    assert isinstance(output, PoolingRequestOutput) and output.outputs.data.tolist() == expected.outputs.embedding


def test_generate_leaves_requests_of_the_engine_alone(engine: LLMEngine, llm: LLM) -> None:
    engine.add_request("mine", "hello", greedy())
    (other,) = llm.generate("other", greedy(), use_tqdm=False)
    assert other.request_id == "0" and other.finished
    assert run(engine)["mine"][-1].outputs == llm.generate("hello", greedy(), use_tqdm=False)[0].outputs


def test_sleep_keeps_open_requests_until_the_engine_wakes(engine: LLMEngine, llm: LLM) -> None:
    (expected,) = llm.generate("hello", greedy(), use_tqdm=False)
    engine.add_request("a", "hello", greedy())
    before = engine.step()
    engine.sleep(level=1)
    assert engine.is_sleeping() and engine.has_unfinished_requests()
    engine.wake_up()
    assert not engine.is_sleeping()
    assert len(before) == 1 and run(engine)["a"][-1].outputs == expected.outputs


def test_a_seed_of_the_engine_repeats_requests_without_one(llm: LLM) -> None:
    folder, outputs = llm._config.model.path, []
    params = SamplingParams(temperature=1.5, max_tokens=12, ignore_eos=True)
    for seed in (1, 1, 2):
        engine = LLMEngine.from_engine_args(
            EngineArgs(folder, seed=seed, dtype="float32", threads=1, kv_cache_memory="8M")
        )
        for name in "ab":
            engine.add_request(name, "hello", params)
        found = run(engine)
        outputs.append([found[name][-1].outputs[0].token_ids for name in "ab"])
        engine.close()
    assert outputs[0] == outputs[1] != outputs[2] and outputs[0][0] != outputs[0][1]
