"""Processes die or hang during open streams, and no stream is lost: a small run of `stress.chaos`."""

import asyncio
import json
import os
import random
import signal
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from defaults import NARROW, TORCH, machine
from waiting import until, until_async

from pagewire.tests.stress import chaos, chaos_streams
from pagewire.tests.stress.chaos_streams import requests
from pagewire.tools.servers import ROOT, Server

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

STREAMS, TOKENS = 16, 96
HANG_S = 8.0
PATIENCE_S = 30.0  # until new connections are served after the death of an api process, on a busy machine
POISON_LEN = 700  # tokens, far more than the streams have


def experiment(server: Server, *, streams: int = STREAMS) -> chaos.Experiment:
    """An experiment that has recorded the results of its undisturbed streams."""
    found = chaos.Experiment(requests(streams, TOKENS), HANG_S, TOKENS, random.Random(1), api_limit_s=PATIENCE_S)
    asyncio.run(found.undisturbed(server))
    return found


@pytest.fixture(scope="module")
def server(default: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with machine(default):
        server = Server(tmp_path_factory.mktemp("server"))
    with server:
        yield server


@pytest.fixture(scope="module")
def streams(server: Server) -> chaos.Experiment:
    return experiment(server)


# Five kinds, because a sixth death within a minute ends a server.
@pytest.mark.parametrize("kind", ["tokenizer", "detokenizer", "core", "grammar", "api"])
def test_streams_are_unchanged_after_a_process_is_killed(server: Server, streams: chaos.Experiment, kind: str) -> None:
    figures = asyncio.run(streams.round(server, kind, signal.SIGKILL))
    assert streams.complaints == []
    assert figures["open"] > 0 and (figures["newcomers"] > 0 or figures["newcomers refused"] > 0)


@pytest.mark.long
def test_a_frozen_worker_is_replaced(tmp_path: Path) -> None:
    """Runs the whole program, which ends with an error if anything is lost or changed."""
    flags = ["--kinds", "worker", "--signals", "STOP", "--rounds", "1", "--hang-timeout", str(HANG_S)]
    size = ["--streams", str(STREAMS), "--tokens", str(TOKENS)]
    chaos.main([*flags, *size, "--json", str(tmp_path / "chaos.json"), "--plots", str(tmp_path)])
    control, row = json.loads((tmp_path / "chaos.json").read_text())["rows"]
    assert (control["name"], row["name"]) == (chaos.NOTHING, "worker STOP")
    assert row["figures"]["longest pause s"][0] > HANG_S / 2
    assert (tmp_path / "chaos.png").stat().st_size > 0


@pytest.mark.parametrize("default", [TORCH], indirect=True)
def test_the_experiment_reports_a_changed_stream(server: Server, streams: chaos.Experiment) -> None:
    """Another seed and temperature, one token less, or a missing usage is reported."""
    changes: tuple[dict[str, Any], ...] = (
        {"seed": 5, "temperature": 1.0},
        {"max_tokens": TOKENS - 1},
        {"stream_options": {}},
    )
    for change in changes:
        altered = [
            chaos_streams.Request(request.path, request.body | (change if i == 0 else {}))
            for i, request in enumerate(streams.requests[:2])
        ]
        other = chaos.Experiment(altered, HANG_S, TOKENS, random.Random(1), streams.expected[:2], streams.newcomer)
        figures = asyncio.run(other.round(server, chaos.NOTHING, signal.SIGKILL))
        assert figures["failed"] + figures["differing"] == 1 and len(other.complaints) == 1


@pytest.mark.long
def test_too_many_deaths_end_the_server(start: Callable[..., Server]) -> None:
    server = start().wait_ready()
    victims: list[psutil.Process] = []

    def has_ended() -> bool:
        with suppress(KeyError, psutil.Error):
            tokenizer = server.children()["tokenizer"]
            if tokenizer not in victims:
                tokenizer.kill()
                victims.append(tokenizer)
        return server.process.poll() is not None or len(victims) == 8

    until(has_ended, "the server gives up", 60)
    assert server.process.wait(60) == 1
    assert len(victims) == 6
    log = server.log.read_text()
    assert "6 processes or connections have died within 60 s" in log
    assert log.count(" s  tokenizer was killed by SIGKILL") == 6


def ask(server: Server, prompt: list[int]) -> tuple[int, dict[str, Any]]:
    """Requests a completion. Returns the status and the body."""
    body = json.dumps({"prompt": prompt, "max_tokens": 4}).encode()
    request = urllib.request.Request(f"{server.url}/v1/completions", body, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            return response.status, json.load(response)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def test_a_request_that_kills_the_worker_fails_alone(
    on_default: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = f"{ROOT / 'tests'}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    monkeypatch.setenv("PYTHONPATH", path)
    poison = [300 + i % 100 for i in range(POISON_LEN)]
    with Server(tmp_path, "--extension", f"suicidal_attention:Suicidal,context={POISON_LEN}") as server:
        streams = experiment(server, streams=8)

        async def beside() -> tuple[list[chaos_streams.Answer], tuple[int, dict[str, Any]]]:
            answers, reads = streams.open_streams(server)
            await until_async(
                lambda: all(choice.ids for answer in answers for choice in answer.choices), "every stream has begun", 60
            )
            answer = await asyncio.to_thread(ask, server, poison)
            await asyncio.gather(*reads)
            return answers, answer

        worker = server.of_kind("worker")[0]
        answers, (status, body) = asyncio.run(beside())
        assert [answer.failure for answer in answers] == [""] * 8
        if on_default != NARROW:
            assert [a.difference(b) for a, b in zip(answers, streams.expected, strict=True)] == [""] * 8
        assert status == 500 and "died twice" in body["error"]["message"]
        until(lambda: bool(server.of_kind("worker")), "the killed worker is replaced", timeout_s=60)
        survivor = server.of_kind("worker")[0]
        assert survivor.pid != worker.pid

        assert ask(server, poison) == (status, body)
        assert server.of_kind("worker")[0] == survivor
        assert ask(server, poison[: POISON_LEN // 2])[0] == 200
