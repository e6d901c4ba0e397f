"""The core's client port over its wire protocol: sessions, windows, and slow, dead and hostile clients."""

import asyncio
import os
import random
import re
import tempfile
from collections.abc import Coroutine, Iterator
from pathlib import Path

import msgspec
import pytest
from engine_clients import MAX_LEN, Engine, address_in, peer
from fakes import VOCAB, expected_output
from waiting import until_async

from pagewire import EngineClient
from pagewire.ipc.client_messages import PROTOCOL, Ack, Bye, Generate, Goodbye, Hello, News, Welcome
from pagewire.ipc.codec import encode
from pagewire.ipc.messages import (
    Accepted,
    Cancel,
    Failed,
    Limits,
    RowLogprobs,
    Sampling,
    Snapshot,
    Tokens,
    Usage,
    bytes_to_ids,
    ids_to_bytes,
)
from pagewire.procs import client_port, topology

FOREVER = Limits(ignore_eos=True)


@pytest.fixture
def address() -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="pw-") as folder:
        yield address_in(Path(folder))


def run(test: Coroutine[object, object, None]) -> None:
    async def bounded() -> None:
        await asyncio.wait_for(test, 120)

    asyncio.run(bounded())


def generate(rid: int, prompt: list[int], limits: Limits = FOREVER, n: int = 1, **fields: bytes) -> Generate:
    return Generate(rid, n, ids_to_bytes(prompt), Sampling(seed=rid % 1000), limits, **fields)  # type: ignore[arg-type]


def outputs(news: News) -> dict[int, list[int]]:
    """Token ids of each sequence."""
    found, ids = {}, bytes_to_ids(news.ids).tolist()
    for rid, count in zip(memoryview(news.rids).cast("q"), bytes_to_ids(news.counts), strict=True):
        found[rid], ids = ids[:count], ids[count:]
    assert not ids
    for tokens in news.tokens:
        assert tokens.rid not in found
        found[tokens.rid] = bytes_to_ids(tokens.ids).tolist()
    return found


def test_a_session_message_by_message(address: str) -> None:
    async def scenario() -> None:
        async with Engine(address) as engine, peer(address) as client:
            assert oct(os.stat(address.removeprefix("ipc://")).st_mode & 0o777) == "0o700"
            await client.say(Hello(PROTOCOL, "me"), generate(2**53 - 2, [1, 2], Limits(max_tokens=6), n=2))
            welcome = await client.hear()
            assert isinstance(welcome, Welcome)
            assert (welcome.model, welcome.vocab_size, welcome.max_model_len) == ("m", VOCAB, MAX_LEN)
            assert welcome.block_size == engine.config.block_size == 4
            news = await client.hear()
            assert isinstance(news, News) and news.seq == 1
            assert [(a.rid, a.num_prompt) for a in news.accepted] == [(2**53 - 2, 2), (2**53 - 1, 2)]
            received: dict[int, list[int]] = {2**53 - 2: [], 2**53 - 1: []}
            ended: set[int] = set()
            seq = 1
            while len(ended) < 2:
                news = await client.hear()
                seq += 1
                assert isinstance(news, News) and news.seq == seq
                for rid, ids in outputs(news).items():
                    received[rid] += ids
                ended |= {tokens.rid for tokens in news.tokens if tokens.finish}
            seed = (2**53 - 2) % 1000
            assert list(received.values()) == [expected_output([1, 2], 6, MAX_LEN, seed + i, False) for i in range(2)]
            assert isinstance(await client.hear(beats=True), Snapshot)
            await client.say(generate(7, [3]), Bye())
            await until_async(
                lambda: engine.num_open == 0 and engine.core._clients is not None, "the client's session ends"
            )
            assert not engine.core._clients._owners  # type: ignore[union-attr]
            for _ in range(8):  # messages sent before the session ended may still arrive
                if await client.silence(0.2):
                    break
            else:
                raise AssertionError("messages keep arriving after Bye")

    run(scenario())


def test_a_slow_client_gets_larger_messages_and_delays_no_other_client(address: str) -> None:
    async def scenario() -> None:
        async with Engine(address), await EngineClient.connect(address) as quick, peer(address) as slow:
            await slow.say(Hello(PROTOCOL, window=2), generate(1, [1], Limits(max_tokens=150, ignore_eos=True)))
            assert isinstance(await slow.hear(), Welcome)
            received = []
            for seq in (1, 2):
                news = await slow.hear()
                assert isinstance(news, News) and news.seq == seq
                received += outputs(news).get(1, [])
            assert await slow.silence(0.1)
            done = await quick.generate([2], Sampling(seed=1), Limits(max_tokens=200, ignore_eos=True)).ids()
            assert done == [expected_output([2], 200, MAX_LEN, 1, True)]
            await slow.say(Ack(1))
            news = await slow.hear()
            assert isinstance(news, News) and news.seq == 3
            received += outputs(news)[1]
            assert news.tokens[0].finish == "length"
            assert received == expected_output([1], 150, MAX_LEN, 1, True)

    run(scenario())


def test_a_client_that_takes_no_output_is_disconnected(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        monkeypatch.setattr(client_port, "STALL_LIMIT_S", 0.2)
        async with Engine(address) as engine, peer(address) as stalled:
            await stalled.say(Hello(PROTOCOL, window=1), generate(1, [1]))
            for kind in (Welcome, News):
                assert isinstance(await stalled.hear(), kind)
            goodbye = await stalled.hear()
            assert isinstance(goodbye, Goodbye) and "taken no output" in goodbye.reason
            await until_async(lambda: engine.num_open == 0, "its sequence is cancelled")
        monkeypatch.setattr(client_port, "STALL_LIMIT_S", 60.0)
        monkeypatch.setattr(client_port, "MAX_BEHIND_BYTES", 500)
        async with Engine(address) as engine, peer(address) as stalled:
            await stalled.say(Hello(PROTOCOL, window=1), generate(1, [1]))
            for kind in (Welcome, News):
                assert isinstance(await stalled.hear(), kind)
            goodbye = await stalled.hear()
            assert isinstance(goodbye, Goodbye) and "more than 500 bytes" in goodbye.reason
            await until_async(lambda: engine.num_open == 0, "its sequence is cancelled")

    run(scenario())


def test_the_death_of_a_client_cancels_only_its_own_requests(address: str) -> None:
    async def scenario() -> None:
        async with Engine(address) as engine, await EngineClient.connect(address) as other:
            engine.held = True
            staying = other.generate([2], Sampling(seed=1), Limits(max_tokens=400, ignore_eos=True))
            async with peer(address) as victim:
                await victim.say(Hello(PROTOCOL), *(generate(rid, [rid]) for rid in range(8)))
                await victim.hear()
                await until_async(lambda: engine.num_open == 9, "all requests are open", 30)
                engine.hold_at, engine.held = engine.num_steps + 20, False
                await until_async(lambda: engine.num_steps == engine.hold_at, "all have output", 30)
            await until_async(lambda: engine.num_open == 1, "its sequences are cancelled, none of which can end", 30)
            engine.hold_at = -1
            assert await staying.ids() == [expected_output([2], 400, MAX_LEN, 1, True)]
            async with peer(address) as waiting:  # its sequence has computed nothing when it disconnects
                engine.held = True
                await waiting.say(Hello(PROTOCOL), generate(1, [1]))
                await until_async(lambda: engine.num_open == 1, "its request is open")
            await until_async(lambda: engine.num_open == 0, "the next ping finds that the client has disconnected")

    run(scenario())


def test_invalid_messages_get_a_goodbye_with_the_reason(address: str) -> None:
    async def goodbye_reason(*frames: bytes) -> str:
        async with peer(address) as client:
            await client.say(Hello(PROTOCOL))
            assert isinstance(await client.hear(), Welcome)
            await client.say_frames(*frames)
            while not isinstance(message := await client.hear(), Goodbye):
                pass
            return message.reason

    async def scenario() -> None:
        async with Engine(address) as engine:
            pack = msgspec.msgpack.encode
            assert "is invalid" in await goodbye_reason(b"")
            assert "is invalid" in await goodbye_reason(b"\xc1")
            assert "is invalid" in await goodbye_reason(pack(["StepPlan", 1]))
            assert "is invalid" in await goodbye_reason(b"\x91" * 100_000)
            assert "2 frames" in await goodbye_reason(b"", encode(Bye()))
            assert "sent twice" in await goodbye_reason(encode(Hello(PROTOCOL)))
            assert "never sent" in await goodbye_reason(encode(Ack(5)))
            assert "is invalid" in await goodbye_reason(pack(["Generate", -1, 1, b""]))
            assert "is invalid" in await goodbye_reason(pack(["Generate", 1, 10**9, b""]))
            async with peer(address) as client:
                await client.say(generate(1, [1]))
                goodbye = await client.hear()
                assert isinstance(goodbye, Goodbye) and "send Hello first" in goodbye.reason
                await client.say(Hello(PROTOCOL + 1))
                goodbye = await client.hear()
                assert isinstance(goodbye, Goodbye) and f"protocol {PROTOCOL}" in goodbye.reason
                await client.say(Hello(PROTOCOL), generate(1, [1]), generate(1, [1]))
                while not isinstance(goodbye := await client.hear(), Goodbye):
                    pass
                assert "open already" in goodbye.reason
            await until_async(lambda: engine.num_open == 0, "no request is open")

    run(scenario())


def test_a_value_out_of_bounds_fails_its_request_alone(address: str) -> None:
    async def scenario() -> None:
        async with Engine(address) as engine, peer(address) as client:
            await client.say(Hello(PROTOCOL))
            await client.hear()
            nan = msgspec.msgpack.encode(["Generate", 1, 2, ids_to_bytes([1]), [float("nan")]])
            short = msgspec.msgpack.encode(["Generate", 3, 1, b"\x01"])
            for data, rids in ((nan, [1, 2]), (short, [3])):
                await client.say_frames(data)
                news = await client.hear()
                assert isinstance(news, News)
                assert [(f.rid, f.kind) for f in news.failed] == [(rid, "invalid_request") for rid in rids]
            for fields in ({"n": 2}, {"limits": Limits(max_tokens=0)}, {"limits": Limits(max_tokens=1)}):
                await client.say(generate(4, [1], resume_ids=ids_to_bytes([1, 2]), **fields))
                news = await client.hear()
                assert isinstance(news, News) and "resume_ids" in news.failed[0].detail
            await client.say(generate(4, [1], Limits(max_tokens=2, min_tokens=3)))
            news = await client.hear()
            assert isinstance(news, News) and "min_tokens" in news.failed[0].detail
            await client.say(Cancel((9,)), generate(1, [1], Limits(max_tokens=1)))
            news = await client.hear()
            assert isinstance(news, News) and news.accepted[0].rid == 1
            await until_async(lambda: engine.num_open == 0, "the request ends")

    run(scenario())


def test_random_bytes_do_not_end_the_core(address: str) -> None:
    async def scenario() -> None:
        rng = random.Random(5)
        good = [
            encode(m)
            for m in (Hello(PROTOCOL), generate(3, [1, 2, 3], n=3), Cancel((3,)), Ack(0), Bye(), generate(4, [1]))
        ]
        async with Engine(address) as engine, await EngineClient.connect(address) as other:
            for _ in range(40):
                async with peer(address) as client:
                    await client.say(Hello(PROTOCOL))
                    for _ in range(20):
                        data = bytearray(rng.choice(good))
                        for _ in range(rng.randrange(4)):
                            data[rng.randrange(len(data))] = rng.randrange(256)
                        await client.say_frames(
                            *[bytes(data[: rng.randrange(len(data) + 9)])] * rng.choice((1, 1, 1, 2))
                        )
                    await client.say(Hello(PROTOCOL))
                    await client.hear()
            assert await other.generate([2], Sampling(seed=1), Limits(max_tokens=30)).ids() == [
                expected_output([2], 30, MAX_LEN, 1, False)
            ]
            await until_async(lambda: engine.num_open == 0, "no request is open")
            assert not engine.core._clients._owners  # type: ignore[union-attr]

    run(scenario())


def test_the_document_lists_every_field_in_order() -> None:
    text = (Path(__file__).parents[2] / "docs" / "ipc-protocol.md").read_text()
    lists = {tuple(re.sub(r"[`\[\]\"]", "", line).split(", ")) for line in re.findall(r"`\[.*?\]`", text)}
    tagged = {*topology.FROM_CLIENT, *topology.TO_CLIENT, Accepted, Failed}
    for kind in (*tagged, Sampling, Limits, Tokens, RowLogprobs, Usage):
        fields = kind.__struct_fields__  # type: ignore[attr-defined]
        assert ((kind.__name__, *fields) if kind in tagged else fields) in lists, kind
