"""The engine on an event loop whose requests have ids."""

import asyncio
from pathlib import Path

import checkpoints
import pytest
import vocabulary

from pagewire import LLM, AsyncEngineArgs, AsyncLLMEngine, RequestOutput, RequestOutputKind, SamplingParams
from pagewire.errors import RequestError

pytestmark = pytest.mark.slow


def test_requests_stream_abort_and_give_the_tokens_of_llm(tmp_path: Path) -> None:
    # So long that not all of `endless` can have come before its reader first runs.
    checkpoints.make_checkpoint(tmp_path, "llama", max_position_embeddings=16_384)
    vocabulary.add_tokenizer(tmp_path)
    options = {"dtype": "float32", "threads": 1, "kv_cache_memory": "32M"}
    greedy = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    with LLM(str(tmp_path), **options) as llm:
        (expected,) = llm.generate("hello", greedy, use_tqdm=False)

    async def collect(engine: AsyncLLMEngine, name: str, params: SamplingParams) -> list[RequestOutput]:
        return [output async for output in engine.generate("hello", params, request_id=name)]

    async def scenario() -> None:
        engine = AsyncLLMEngine.from_engine_args(AsyncEngineArgs(str(tmp_path), enforce_eager=True, **options))
        try:
            final = greedy.clone()
            final.output_kind = RequestOutputKind.FINAL_ONLY
            delta = greedy.clone()
            delta.output_kind = RequestOutputKind.DELTA
            whole, last, parts = await asyncio.gather(
                collect(engine, "a", greedy), collect(engine, "b", final), collect(engine, "c", delta)
            )
            assert whole[-1].outputs == expected.outputs and whole[-1].request_id == "a" and whole[-1].finished
            assert len(last) == 1 and last[0].outputs == expected.outputs
            assert [id for part in parts for id in part.outputs[0].token_ids] == expected.outputs[0].token_ids

            endless = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)
            seen: list[RequestOutput] = []
            async for output in engine.generate("hello", endless, request_id="d"):
                seen.append(output)
                if len(seen) == 2:
                    with pytest.raises(ValueError, match="'d' is in use"):
                        await anext(engine.generate("x", greedy, request_id="d"))
                    await engine.abort("d")
            assert seen[-1].finished and seen[-1].outputs[0].finish_reason == "abort"
            with pytest.raises(RequestError, match="maximum context length"):
                await anext(engine.generate("x" * 50_000, greedy, request_id="long"))
            await engine.check_health()
            assert (await engine.get_tokenizer()).decode(expected.outputs[0].token_ids, skip_special_tokens=True)
        finally:
            await engine.shutdown()

    asyncio.run(scenario())
