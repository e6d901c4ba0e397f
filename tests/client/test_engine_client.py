"""`EngineClient` with the real core over real sockets; a fake worker makes the output of each request predictable."""

import asyncio
import tempfile
from collections.abc import Coroutine, Iterator
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from engine_clients import MAX_LEN, Engine, address_in
from fakes import all_tokens, enqueue, expected_output
from waiting import until_async

from pagewire import LLM, EngineClient
from pagewire.errors import ConfigError, RequestError, StartError
from pagewire.ipc.messages import Limits, Sampling, TokenBatch, bytes_to_ids
from pagewire.ipc.zmq_channel import read_keys


@pytest.fixture
def address() -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="pw-") as folder:  # sockets need short paths
        yield address_in(Path(folder))


def run(test: Coroutine[object, object, None]) -> None:
    async def bounded() -> None:
        await asyncio.wait_for(test, 60)

    asyncio.run(bounded())


def expected(prompt: list[int], max_tokens: int, seed: int, *, ignore_eos: bool = False) -> list[int]:
    return expected_output(prompt, max_tokens, MAX_LEN, seed, ignore_eos)


def test_clients_and_the_chain_of_processes_get_their_own_outputs(address: str) -> None:
    async def use_client(number: int) -> None:
        async with await EngineClient.connect(address, name=f"client-{number}") as client:
            assert (client.facts.model, client.facts.max_model_len) == ("m", MAX_LEN)
            prompts = [[number, i, 3] for i in range(12)]
            generations = [client.generate(p, Sampling(seed=9), Limits(max_tokens=40), n=2) for p in prompts]
            for prompt, outputs in zip(prompts, await asyncio.gather(*(g.ids() for g in generations)), strict=True):
                assert outputs == [expected(prompt, 40, 9), expected(prompt, 40, 10)]

    async def scenario() -> None:
        async with Engine(address) as engine:
            engine.handle(*(enqueue(rid, [rid, 1], max_tokens=30, seed=4) for rid in range(5)))
            await asyncio.gather(*map(use_client, range(5)))
            await until_async(lambda: engine.num_open == 0, "all requests end")
        chain_ids: dict[int, list[int]] = {}
        for receiver, message in engine.sent:
            assert getattr(message, "rid", 0) < 5, (receiver, message)
            for tokens in all_tokens(message) if isinstance(message, TokenBatch) else ():
                chain_ids.setdefault(tokens.rid, []).extend(bytes_to_ids(tokens.ids))
        assert chain_ids == {rid: expected([rid, 1], 30, 4) for rid in range(5)}

    run(scenario())


def test_outputs_have_logprobs_usage_and_finish(address: str) -> None:
    async def scenario() -> None:
        async with Engine(address), await EngineClient.connect(address) as client:
            sampling = Sampling(seed=3, logprobs=1, prompt_logprobs=1)
            ids: list[Any] = []
            scored: list[Any] = []
            prompt, num_logprobs, last = list(range(1, 20)), 0, None
            async for choice, tokens in client.generate(
                prompt, sampling, Limits(max_tokens=30, stop_token_ids=(2, 3, 4, 5))
            ):
                assert choice == 0 and last is None
                ids += bytes_to_ids(tokens.ids)
                num_logprobs += len(bytes_to_ids(tokens.logprobs.ids)) if tokens.logprobs else 0
                scored += bytes_to_ids(tokens.prompt_logprobs.ids) if tokens.prompt_logprobs else []
                last = tokens if tokens.finish else None
            assert ids == expected_output(prompt, 30, MAX_LEN, 3, False, (2, 3, 4, 5))
            assert scored == prompt[1:] and num_logprobs == len(ids)
            assert last is not None and last.usage is not None
            assert (last.usage.num_prompt, last.usage.num_output) == (len(prompt), len(ids))
            assert last.finish == "stop" and last.stop_token_id == (ids[-1] if ids[-1] in (2, 3, 4, 5) else None)
            snapshot = await client.snapshot()
            assert snapshot.num_output_tokens == len(ids) and snapshot.num_running == 0

    run(scenario())


def test_cancelled_requests_end(address: str) -> None:
    async def scenario() -> None:
        async with Engine(address) as engine, await EngineClient.connect(address) as client:
            for _ in range(5):  # on a busy machine both may end at the limit before the core hears of it
                generation = client.generate([1, 2], Sampling(seed=1), Limits(ignore_eos=True), n=2)
                got: list[list[int]] = [[], []]
                finishes = []
                async for choice, tokens in generation:
                    got[choice] += bytes_to_ids(tokens.ids)
                    generation.cancel()
                    finishes += [tokens.finish] if tokens.finish else []
                for choice, ids in enumerate(got):
                    assert ids == expected([1, 2], MAX_LEN, 1 + choice, ignore_eos=True)[: len(ids)]
                if finishes == ["abort", "abort"]:
                    break
            assert finishes == ["abort", "abort"]
            assert all(len(ids) < MAX_LEN - 2 for ids in got), "it ended at the limit"
            async with client.generate([1, 2], limits=Limits(ignore_eos=True)):
                await until_async(lambda: engine.num_open == 1, "the request runs")
            await until_async(lambda: engine.num_open == 0, "leaving the block cancels")

    run(scenario())


@pytest.mark.parametrize(
    ("prompt", "sampling", "limits", "kind"),
    [
        ([1, 50], Sampling(), Limits(), "invalid_request"),
        ([-1], Sampling(), Limits(), "invalid_request"),
        ([], Sampling(), Limits(), "invalid_request"),
        ([1], Sampling(logit_bias={99: 1.0}), Limits(), "invalid_request"),
        ([1], Sampling(), Limits(stop_token_ids=(50,)), "invalid_request"),
        ([1], Sampling(temperature=-1.0), Limits(), "invalid_request"),
        ([1], Sampling(logprobs=21), Limits(), "invalid_request"),
        ([1], Sampling(seed=2**80), Limits(), "invalid_request"),
        ([2**40], Sampling(), Limits(), "invalid_request"),
        ([1] * MAX_LEN, Sampling(), Limits(), "context_length_exceeded"),
        ([1] * MAX_LEN * 2, Sampling(), Limits(), "context_length_exceeded"),
    ],
)
def test_a_refused_request_does_not_affect_others(
    address: str, prompt: list[int], sampling: Sampling, limits: Limits, kind: str
) -> None:
    async def scenario() -> None:
        async with Engine(address), await EngineClient.connect(address) as client:
            good = client.generate([1], Sampling(seed=5), Limits(max_tokens=20))
            with pytest.raises(RequestError) as refused:
                await client.generate(prompt, sampling, limits, n=2).ids()
            assert refused.value.kind == kind, str(refused.value)
            with pytest.raises(RequestError, match="128"):
                client.generate([1], n=129)
            assert await good.ids() == [expected([1], 20, 5)]

    run(scenario())


def test_a_full_queue_refuses(address: str) -> None:
    async def scenario() -> None:
        async with Engine(address, max_queued_requests=3) as engine, await EngineClient.connect(address) as client:
            engine.held = True
            generations = [client.generate([1, i], Sampling(seed=i), Limits(max_tokens=5)) for i in range(40)]
            await until_async(lambda: any(g._error for g in generations), "some are refused")
            engine.held = False
            results = await asyncio.gather(*(g.ids() for g in generations), return_exceptions=True)
            refused = [r for r in results if isinstance(r, RequestError)]
            assert refused and all(r.kind == "queue_full" for r in refused)
            for i, result in enumerate(results):
                assert isinstance(result, RequestError) or result == [expected([1, i], 5, i)]

    run(scenario())


@pytest.mark.parametrize("announces_stop", [True, False])
def test_outputs_continue_when_the_engine_is_replaced(
    address: str, announces_stop: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit = "pagewire.client.engine_client.SILENCE_LIMIT_S"
    monkeypatch.setattr(limit, 60.0)

    async def scenario() -> None:
        async with Engine(address) as first, await EngineClient.connect(address) as client:
            limits = Limits(max_tokens=400, ignore_eos=True)
            generations = [client.generate([i, 2], Sampling(seed=i), limits, n=2) for i in range(2)]
            late = client.generate([40], Sampling(seed=1), Limits(max_tokens=3))
            await late.ids()
            ids = [ids for generation in generations for ids in generation._ids]
            await until_async(lambda: all(len(one) > 30 for one in ids), "tokens of all requests have come", 30)
            first.held = True
            if not announces_stop:  # it dies
                first.core._clients._sessions.clear()  # type: ignore[union-attr]
            await first.stop()
            if announces_stop:
                await until_async(lambda: not client._is_welcome, "the client knows that the engine stops")
            cancelled = client.generate([3], limits=limits)
            cancelled.cancel()
            if not announces_stop:
                monkeypatch.setattr(limit, 0.0)
                await until_async(lambda: not client._is_welcome, "the client notices the silence")
                monkeypatch.setattr(limit, 60.0)
            async with Engine(address) as second:
                outputs = await asyncio.gather(*(g.ids() for g in generations))
                assert 0 < second.num_steps < 400, "delivered tokens are not computed again"
                assert await cancelled.ids() == [[]]
                assert second.num_open == 0
            for i, output in enumerate(outputs):
                assert output == [expected([i, 2], 400, i + k, ignore_eos=True) for k in range(2)]

    run(scenario())


def test_a_lost_engine_or_another_model_fails_open_requests(address: str) -> None:
    async def scenario() -> None:
        async with Engine(address) as engine:
            client = await EngineClient.connect(address, reconnect_s=0.3)
            other = await EngineClient.connect(address)
            forever = Limits(ignore_eos=True)
            lost, replaced = client.generate([1], limits=forever), other.generate([1], limits=forever)
            await until_async(lambda: engine.num_open == 2, "both run")
            engine.held = True
            await engine.stop()
        with pytest.raises(RequestError, match="engine is gone"):
            await lost.ids()
        async with Engine(address, path="another"):
            with pytest.raises(RequestError, match="another model"):
                await replaced.ids()
        await client.close()
        await other.close()
        with pytest.raises(RequestError, match="closed"):
            client.generate([1])

    run(scenario())


def has_one_open(engine: Engine) -> bool:
    return engine.num_open == 1


def test_a_request_that_kills_three_engines_fails(address: str) -> None:
    async def scenario() -> None:
        async with AsyncExitStack() as stack:
            engine = await stack.enter_async_context(Engine(address))
            client = await stack.enter_async_context(await EngineClient.connect(address))
            engine.held = True
            poison = client.generate([1], limits=Limits(ignore_eos=True))
            for _ in range(3):
                await until_async(partial(has_one_open, engine), "the request is open")
                await engine.stop()
                engine = await stack.enter_async_context(Engine(address))
                engine.held = True
            with pytest.raises(RequestError, match="3 times in a row"):
                await poison.ids()
            engine.held = False
            fine = client.generate([1], Sampling(seed=3), Limits(max_tokens=4))
            assert await fine.ids() == [expected([1], 4, 3)]
            assert engine.num_open == 0

    run(scenario())


def test_an_engine_in_the_callers_process_has_no_client_address() -> None:
    with pytest.raises(ConfigError, match=r"EngineClient\.start"):
        LLM(client_address="ipc:///nowhere")


def test_without_an_engine_connect_fails(address: str) -> None:
    async def scenario() -> None:
        with pytest.raises(StartError, match="No engine answers"):
            await EngineClient.connect(address, timeout_s=0.2)

    run(scenario())


def test_a_tcp_client_needs_the_key(tmp_path: Path) -> None:
    async def scenario() -> None:
        from pagewire.tools.servers import free_port

        address = f"tcp://127.0.0.1:{free_port()}"
        keys = read_keys(tmp_path / "key")
        read_keys(tmp_path / "other")
        async with Engine(address, keys=keys):
            async with await EngineClient.connect(address, key_file=tmp_path / "key") as client:
                assert await client.generate([1], Sampling(seed=2), Limits(max_tokens=9)).ids() == [expected([1], 9, 2)]
            for key_file in (None, tmp_path / "other"):
                with pytest.raises(StartError):
                    await EngineClient.connect(address, key_file=key_file, timeout_s=0.5)
        with pytest.raises(ConfigError, match="key-file"):
            async with Engine("tcp://0.0.0.0:1"):
                pass

    run(scenario())


def test_an_address_in_use_is_refused(address: str) -> None:
    async def scenario() -> None:
        async with Engine(address):
            with pytest.raises(ConfigError, match="another process does"):
                Engine(address).core.start(lambda receiver, message: None)

    run(scenario())
