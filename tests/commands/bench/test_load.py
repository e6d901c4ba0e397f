"""The load on servers that answer in other ways than pagewire, or not at all."""

import asyncio
import json
import statistics
from itertools import pairwise

import pytest
from aiohttp import web

from pagewire.commands.bench.load import Outcome, Sample, Target, arrival_times, run, wait_ready
from pagewire.errors import PagewireError

SAMPLE = Sample("hi", 1, 3)


def event(**fields: object) -> bytes:
    return b"data: " + json.dumps(fields).encode() + b"\n\n"


def text(piece: str) -> bytes:
    return event(choices=[{"text": piece}])


DONE = b"data: [DONE]\n\n"
ANSWERS = {  # path → the pieces of its answer
    "plain": [
        b": comment\n\n",
        text("a"),
        text(""),
        text("b"),
        event(choices=[], usage={"completion_tokens": 7}),
        DONE,
    ],
    "split": [b"da", b'ta:{"choices":[{"text":"a"}]}\r\n\r\nda', b"ta: [DO", b"NE]\r\n\r\n"],
    "chat": [event(choices=[{"delta": {"role": "assistant"}}]), event(choices=[{"delta": {"content": "a"}}]), DONE],
    "thinks": [
        event(choices=[{"delta": {"reasoning_content": "a"}}]),
        event(choices=[{"delta": {"content": "b"}}]),
        DONE,
    ],
    "silent": [DONE],
    "cut": [text("a")],
    "fails": [text("a"), event(error={"message": "out of paper"}), DONE],
    "noise": [b"data: {]\n\n"],
}


async def answer(request: web.Request) -> web.StreamResponse:
    name = request.match_info["name"]
    if name == "busy":
        return web.Response(status=503, text="no room")
    body = await request.json()
    assert body["stream"] and body["model"] == "m" and body["temperature"] == 0
    response = web.StreamResponse()
    await response.prepare(request)
    for piece in ANSWERS[name]:
        await response.write(piece)
        await asyncio.sleep(0)
    return response


async def ask(*names: str, at_once: int | None = None) -> list[Outcome]:
    """The outcome of a request to each path."""
    app = web.Application()
    app.router.add_post("/{name}", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port = runner.addresses[0][1]
        found = []
        for name in names:
            url = f"http://127.0.0.1:{port}/{name}"
            target = Target(url=url, is_chat=name in ("chat", "thinks"), model="m", fields={"temperature": 0})
            found += await run(target, [SAMPLE], [0.0], max_concurrency=at_once, on_end=lambda outcome: None)
        return found
    finally:
        await runner.cleanup()


def test_streams_of_several_forms() -> None:
    plain, split, chat, thinks = asyncio.run(ask("plain", "split", "chat", "thinks"))
    assert (plain.text, plain.num_output, plain.num_prompt, plain.error) == ("ab", 7, 1, "")
    assert (
        len(plain.itl) == 1
        and 0 < plain.ttft <= plain.latency
        and plain.latency == pytest.approx(plain.ttft + sum(plain.itl))
    )
    assert (split.text, split.num_output, split.error) == ("a", 1, "") and split.tpot == 0
    assert (chat.text, chat.num_output, chat.error) == ("a", 1, "")
    assert (thinks.text, thinks.num_output) == ("ab", 2) and thinks.tpot == pytest.approx(thinks.itl[0])


def test_failures_are_outcomes() -> None:
    silent, cut, fails, noise, busy = asyncio.run(ask("silent", "cut", "fails", "noise", "busy"))
    assert silent.error == "the answer ended before its first token" and cut.error == "the stream broke off"
    assert "out of paper" in fails.error and noise.error and busy.error == "503: no room"


def test_a_server_that_is_not_there() -> None:
    target = Target(url="http://127.0.0.1:9/v1/completions", is_chat=False, model="m")
    with pytest.raises(PagewireError, match="does not answer a first request"):
        asyncio.run(wait_ready(target, SAMPLE, 0.0))


def test_at_most_so_many_requests_run_at_once() -> None:
    most = now = 0

    async def slow(request: web.Request) -> web.StreamResponse:
        nonlocal most, now
        now += 1
        most = max(most, now)
        for _ in range(50):
            await asyncio.sleep(0)
        now -= 1
        return web.Response(body=text("a") + DONE)

    async def scenario() -> list[Outcome]:
        app = web.Application()
        app.router.add_post("/", slow)
        runner = web.AppRunner(app)
        await runner.setup()
        try:
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            target = Target(url=f"http://127.0.0.1:{runner.addresses[0][1]}/", is_chat=False, model="m")
            return await run(target, [SAMPLE] * 9, [0.0] * 9, max_concurrency=3, on_end=lambda outcome: None)
        finally:
            await runner.cleanup()

    outcomes = asyncio.run(scenario())
    assert [outcome.error for outcome in outcomes] == [""] * 9 and most == 3


def test_arrivals_follow_rate_and_burstiness() -> None:
    assert arrival_times(3, float("inf"), 1.0, 0) == [0.0] * 3
    spreads = []
    for burstiness in (0.2, 1.0, 50.0):
        times = arrival_times(2000, 10.0, burstiness, seed=1)
        assert times == sorted(times) == arrival_times(2000, 10.0, burstiness, seed=1) and times[-1] == pytest.approx(
            200
        )
        pauses = [b - a for a, b in pairwise(times)]
        spreads.append(statistics.stdev(pauses) / statistics.fmean(pauses))
    assert spreads[0] > 1.8 and spreads[1] == pytest.approx(1.0, abs=0.1) and spreads[2] < 0.2
