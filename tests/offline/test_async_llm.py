"""AsyncLLM on a tiny random model: the outputs of `LLM`, many requests at once, and no process left behind."""

import asyncio
from pathlib import Path

import checkpoints
import psutil
import pytest
import vocabulary

from pagewire import LLM, AsyncLLM, RequestOutput, SamplingParams, StructuredOutputsParams
from pagewire.errors import PagewireError, RequestError

OPTIONS = {"dtype": "float32", "threads": 1, "kv_cache_memory": "32M"}
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
CASES = [
    GREEDY,
    SamplingParams(n=3, seed=5, temperature=1.3, max_tokens=12),
    SamplingParams(temperature=0, max_tokens=6, logprobs=2, prompt_logprobs=1, ignore_eos=True),
    SamplingParams(temperature=0, max_tokens=5, detokenize=False, ignore_eos=True),
    SamplingParams(seed=3, max_tokens=40, structured_outputs=StructuredOutputsParams(regex="[0-9]{1,3}(,[0-9]{3})*")),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder: Path = tmp_path_factory.mktemp("async_llm")
    checkpoints.make_checkpoint(folder, "llama")
    vocabulary.add_tokenizer(folder)
    return str(folder)


async def last_output(llm: AsyncLLM, prompt: str | list[int], params: SamplingParams) -> RequestOutput:
    async for output in llm.generate(prompt, params):
        last = output
    assert last.finished
    return last


def children() -> set[int]:
    return {process.pid for process in psutil.Process().children(recursive=True)}


def test_async_llm_gives_the_outputs_of_llm(model: str) -> None:
    before = children()
    with LLM(model, **OPTIONS) as llm:
        expected = [llm.generate("hello", params, use_tqdm=False)[0] for params in CASES]
        stop = expected[0].outputs[0].text[3:5]
        stopping = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, stop=stop)
        (stopped,) = llm.generate("hello", stopping, use_tqdm=False)
        (answered,) = llm.chat([{"role": "user", "content": "hi"}], GREEDY, use_tqdm=False)

    async def work() -> None:
        async with AsyncLLM(model, **OPTIONS) as llm:
            outputs = await asyncio.gather(*(last_output(llm, "hello", params) for params in CASES))
            assert [o.outputs for o in outputs] == [o.outputs for o in expected]
            assert outputs[2].prompt_logprobs == expected[2].prompt_logprobs
            ids = expected[0].prompt_token_ids
            assert (await last_output(llm, ids, GREEDY)).outputs == expected[0].outputs
            assert llm.get_tokenizer().decode(ids, skip_special_tokens=False) == expected[0].prompt
            assert (await last_output(llm, "hello", stopping)).outputs == stopped.outputs
            *_, output = [output async for output in llm.chat([{"role": "user", "content": "hi"}], GREEDY)]
            assert output.outputs == answered.outputs and output.prompt == answered.prompt

            # Outputs grow. On a busy machine all tokens may have come before this task first runs, so it may ask again.
            for _ in range(20):
                lengths: list[int] = []
                async for output in llm.generate(
                    "hello", SamplingParams(temperature=0, max_tokens=400, ignore_eos=True)
                ):
                    lengths.append(len(output.outputs[0].token_ids))
                assert lengths == sorted(lengths) and lengths[-1] == 400
                if len(lengths) > 1:
                    break
            assert len(lengths) > 1

            # Many requests at once do not affect each other.
            many = await asyncio.gather(*(last_output(llm, f"prompt {i}", GREEDY) for i in range(40)))
            alone = await last_output(llm, "prompt 7", GREEDY)
            assert many[7].outputs == alone.outputs

            # Closing the iterator cancels the request; an invalid request raises at once.
            endless = llm.generate("hello", SamplingParams(max_tokens=None, ignore_eos=True))
            async for _ in endless:
                break
            await endless.aclose()
            async with asyncio.timeout(60):
                while (await llm.snapshot()).num_running:
                    pass
            with pytest.raises(RequestError, match="maximum context length"):
                await last_output(llm, [5] * 10_000, GREEDY)
            with pytest.raises(ValueError, match="SamplingParams"):
                await last_output(llm, "hello", SamplingParams(temperature=-1.0))
            assert (await last_output(llm, "hello", GREEDY)).outputs == expected[0].outputs

    asyncio.run(work())
    assert children() <= before


def test_a_request_that_the_engine_refuses_leaves_no_output_buffer(model: str) -> None:
    async def work() -> None:
        async with AsyncLLM(model, **OPTIONS | {"kv_cache_memory": "64K"}) as llm:
            with pytest.raises(RequestError, match="maximum context length"):
                await last_output(llm, [5] * 200, GREEDY)
            assert not llm._detokenizer._outputs

    asyncio.run(work())


def test_without_a_model_no_process_is_started(tmp_path: Path) -> None:
    before = children()

    async def work() -> None:
        idle = AsyncLLM(str(tmp_path))
        with pytest.raises(RequestError, match="async with"):
            await last_output(idle, "hello", GREEDY)
        with pytest.raises(PagewireError):
            await idle.start()
        await idle.close()

    asyncio.run(work())
    assert children() <= before
