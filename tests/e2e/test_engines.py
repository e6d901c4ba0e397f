"""Several engines behind one api: deaths in one of them under streams, restarts in turn, and what clients see of it."""

import asyncio
import contextlib
import json
import os
import re
import signal
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import aiohttp
import httpx
import msgspec
import psutil
import pytest
import zmq
from waiting import until

from pagewire.bench.serve.route_streams import Body, Told, bodies, differences, read_streams
from pagewire.config.cpu_bind import bind_ranks
from pagewire.config.machine import machine_facts
from pagewire.tools.servers import Server, is_alive

pytestmark = [pytest.mark.e2e, pytest.mark.slow]
Start = Callable[..., Server]
ADMIN = {"authorization": "Bearer of-the-administrator"}
FLAGS = ("--data-parallel-size", "2", "--no-access-log", "--kv-cache-memory", "32M")


def engines_of(server: Server) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(server.get("/health"))["engines"]
    return found


def wait_until_all_take_requests(server: Server) -> None:
    until(lambda: all(engine["ready"] for engine in engines_of(server)), "both engines take requests", 120)


def by_engine(server: Server, name: str) -> list[float]:
    """A metric of engine 0 and of engine 1."""
    lines = re.findall(rf'^pagewire:{name}{{[^}}]*engine="(\d)"[^}}]*}} (\S+)$', server.get("/metrics"), re.MULTILINE)
    return [sum(float(value) for engine, value in lines if engine == number) for number in "01"]


def pids(server: Server, kind: str) -> set[int]:
    """Of the actors of a kind in all engines."""
    return {process.pid for name, process in server.children().items() if name.startswith(kind)}


async def killed_beneath(
    server: Server, victim: psutil.Process, asked: Sequence[tuple[str, Body]], after: int
) -> list[Told]:
    """Reads the streams, and kills a process after that many events, unless all have come by then."""
    count = [0]
    reading = asyncio.ensure_future(read_streams(server.url, asked, count))
    while count[0] < after and not reading.done():
        await asyncio.sleep(0.005)
    if not reading.done():
        victim.kill()
    return await reading


def wait_until_runs(server: Server, actor: str) -> psutil.Process:
    """Its process, which serves."""

    def found() -> psutil.Process | None:
        process = server.children().get(actor)
        return process if process is not None and is_alive(process) else None

    process = until(found, f"{actor} runs", 120)
    wait_until_all_take_requests(server)
    assert process is not None
    return process


def die_and_go_on(server: Server, victims: Sequence[str]) -> None:
    """Kills these under streams: every stream is the same as without, and only those of one engine are resumed."""
    asked = bodies(8, 300)
    expected = asyncio.run(read_streams(server.url, asked, [0]))
    assert not any(told.error for told in expected), expected
    num_events = sum(len(text) for told in expected for text in told.texts) // 8
    for victim in victims:
        num_resumed = 0.0
        for _ in range(4):  # the streams may end while this process does not run
            process, before = wait_until_runs(server, victim), server.metric("pagewire:requests_resumed_total")
            told = asyncio.run(killed_beneath(server, process, asked, num_events // 3))
            assert not differences(expected, told), f"{victim}: {server.log.read_text()[-3000:]}"
            wait_until_runs(server, victim)
            if num_resumed := server.metric("pagewire:requests_resumed_total") - before:
                break
        num_sequences = sum(int(body.get("n", 1)) for _, body in asked)
        assert 0 < num_resumed < num_sequences, victim


def test_a_death_in_one_engine_moves_its_streams_to_the_other(start: Start) -> None:
    server = start(*FLAGS, "--enable-sleep-mode", "--admin-api-key", "of-the-administrator").wait_ready()
    assert "2 engines" in server.announced()
    if cpu_sets := bind_ranks("auto", 2, machine_facts()):
        ranks = [process for name, process in server.children().items() if name.startswith("worker")]
        assert sorted(tuple(rank.cpu_affinity()) for rank in ranks) == sorted(cpu_sets)
    assert all(by_engine(server, "engine_ready")) and server.load()["num_running"] == 0
    die_and_go_on(server, ["worker of engine 1", "detokenizer of engine 0"])
    assert "engine 1: worker of engine 1 was killed" not in server.log.read_text(), "the engine is named once"
    assert "engine 1: worker was killed by SIGKILL. Replacing worker." in server.log.read_text()

    prompts = [f"{text} " * 200 for text in ("Every tale begins with a king.", "The sea is calm, the ship is old.")]

    def ask(prompt: str) -> None:
        body = {"prompt": prompt, "max_tokens": 1, "temperature": 0}
        assert httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).status_code == 200

    for prompt in prompts:
        ask(prompt)
    until(lambda: not any(server.load().values()), "the first prompts are done", 60)
    hits, asked = sum(by_engine(server, "prefix_cache_hits_total")), by_engine(server, "engine_requests_total")
    for _ in range(3):
        for prompt in prompts:
            ask(prompt)
    until(lambda: sum(by_engine(server, "prefix_cache_hits_total")) > hits + 1000, "the engines have the prompts", 60)
    more = [now - before for now, before in zip(by_engine(server, "engine_requests_total"), asked, strict=True)]
    assert sum(more) == 6 and all(num % 3 == 0 for num in more), "each prompt goes where it was"

    slept = httpx.post(f"{server.url}/sleep", headers=ADMIN, timeout=60).json()
    assert slept["is_sleeping"] and slept["freed_bytes"] > 2 * (30 << 20), "the memory of both"
    until(
        lambda: httpx.get(f"{server.url}/is_sleeping", headers=ADMIN, timeout=60).json()["is_sleeping"],
        "both sleep",
        60,
    )
    assert not server.answers("/ready")
    assert httpx.post(f"{server.url}/wake_up", headers=ADMIN, timeout=60).json() == {"is_sleeping": False}
    until(lambda: server.answers("/ready"), "both are awake", 60)
    ask(prompts[0])
    processes = server.supervisor.children(recursive=True)
    assert server.stop() == 0, server.log.read_text()
    until(lambda: not any(is_alive(process) for process in processes), "no process is left", 30)


@pytest.mark.long
def test_any_process_of_an_engine_may_die_and_engines_restart_in_turn(start: Start, tmp_path: Path) -> None:
    events = f"ipc://{tmp_path}/events"
    swapping = ("--enable-model-swap", "--admin-api-key", "of-the-administrator")
    server = start(*FLAGS, "--kv-events", events, *swapping).wait_ready()
    numbers: list[int] = []
    with zmq.Context() as context, ExitStack() as sockets:
        subscribers = [sockets.enter_context(context.socket(zmq.SUB)) for _ in range(2)]
        for subscriber, address in zip(subscribers, (events, f"{events}.1"), strict=True):
            subscriber.subscribe(b"")
            subscriber.connect(address)
        asyncio.run(read_streams(server.url, bodies(8, 20), [0]))
        for subscriber in subscribers:
            assert subscriber.poll(30_000)
            numbers.append(msgspec.msgpack.decode(subscriber.recv_multipart()[2])[2])
    assert numbers == [0, 1], "each engine publishes its own blocks"
    die_and_go_on(server, [f"{kind} of engine 0" for kind in ("core", "tokenizer", "grammar", "worker")])
    asked = bodies(6, 40)
    expected = asyncio.run(read_streams(server.url, asked, [0]))
    old = pids(server, "core")

    async def served_until_restarted() -> int:
        """Repeats the streams until the log says so. Returns the number of repetitions."""
        for num in range(1, 1000):
            assert not differences(expected, await read_streams(server.url, asked, [0])), server.log.read_text()
            if "every engine was restarted" in server.log.read_text():
                return num
            await asyncio.sleep(0.3)  # leaves the cores to the engine that starts
        raise AssertionError(server.log.read_text())

    os.kill(server.process.pid, signal.SIGHUP)
    assert asyncio.run(served_until_restarted()) > 1
    wait_until_all_take_requests(server)
    assert not old & pids(server, "core")
    server.children()["api"].kill()
    until(lambda: server.answers("/ready"), "the api is replaced", 60)
    wait_until_all_take_requests(server)
    assert not differences(expected, asyncio.run(read_streams(server.url, asked, [0])))
    cores = pids(server, "core")
    swapped = httpx.post(f"{server.url}/admin/models", json={"max_num_seqs": 8}, headers=ADMIN, timeout=120)
    assert swapped.status_code in (200, 202), swapped.text
    until(lambda: cores.isdisjoint(pids(server, "core")), "both engines are replaced", 120)
    until(lambda: server.answers("/ready"), "the new engines serve", 120)
    assert not differences(expected, asyncio.run(read_streams(server.url, asked, [0])))
    assert server.stop() == 0, server.log.read_text()


def fail_engine(server: Server, number: int) -> None:
    """Kills its processes until it cannot be healed and is started again."""
    names = [f"{kind} of engine {number}" for kind in ("tokenizer", "detokenizer", "grammar")]

    def has_failed() -> bool:
        if f"engine {number} has failed and is started again" in server.log.read_text():
            return True
        children = server.children()
        for name in names:
            if name in children:
                with contextlib.suppress(psutil.NoSuchProcess):
                    children[name].kill()
        return False

    until(has_failed, "the engine has failed", 60)


@pytest.mark.long
def test_an_api_process_that_starts_while_an_engine_loads_sends_that_one_nothing(start: Start) -> None:
    server = start(*FLAGS).wait_ready()
    fail_engine(server, 0)
    until(lambda: "core of engine 0" in server.children(), "it starts again", 60)
    loading = server.children()["core of engine 0"]
    loading.suspend()  # until then it is not ready
    server.children()["api"].kill()
    until(lambda: server.answers("/ready"), "the api is replaced", 60)
    assert [engine["ready"] for engine in engines_of(server)] == [False, True], server.log.read_text()
    body = {"max_tokens": 2, "temperature": 0}
    for prompt in ("One", "Two", "Three", "Four"):
        assert httpx.post(f"{server.url}/tokenize", json={"prompt": prompt}, timeout=60).status_code == 200
        answer = httpx.post(f"{server.url}/v1/completions", json={**body, "prompt": prompt}, timeout=60)
        assert answer.status_code == 200, answer.text
    loading.resume()
    wait_until_all_take_requests(server)
    assert server.stop() == 0, server.log.read_text()


@pytest.mark.long
def test_an_api_process_of_two_dies_beside_streams_of_the_other(start: Start) -> None:
    server = start(*FLAGS, "--api-processes", "2").wait_ready()
    asked = bodies(8, 200)
    expected = asyncio.run(read_streams(server.url, asked, [0]))

    async def beside_a_death() -> list[list[Told] | BaseException]:
        count = [0]
        each = [read_streams(server.url, [one], count) for one in asked]
        reading = asyncio.gather(*each, return_exceptions=True)
        while count[0] < 40:
            await asyncio.sleep(0.005)
        server.children()["api-1"].kill()
        return await reading

    told = asyncio.run(beside_a_death())
    for want, got in zip(expected, told, strict=True):  # its own streams break off
        assert isinstance(got, aiohttp.ClientError) or not differences([want], got), got  # type: ignore[arg-type]
    until(lambda: server.answers("/ready"), "both api processes serve", 60)
    again = asyncio.run(read_streams(server.url, asked, [0]))
    assert not differences(expected, again), server.log.read_text()
    assert server.stop() == 0, server.log.read_text()
