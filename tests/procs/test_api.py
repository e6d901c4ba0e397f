"""The API actor: its observers of ended requests, its check of the trace endpoint, and its health while stopping."""

import asyncio
import socket
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pytest

from pagewire.api.gateway.request_end import Observer, log_request
from pagewire.api.http.http_error import EngineFailed
from pagewire.config.config import MachineFacts, ModelFacts
from pagewire.config.flags import make_config
from pagewire.config.resolve import resolve, resolve_http
from pagewire.errors import ConfigError
from pagewire.ipc.actor import Post
from pagewire.ipc.messages import (
    Describe,
    IdsPrompt,
    Limits,
    Ping,
    Reset,
    Restored,
    Sampling,
    Stop,
    Submit,
    TextSpec,
    ids_to_bytes,
)
from pagewire.procs.api import ApiActor


def make_actor(
    tmp_path: Path, http_fd: int = -1, engines: Sequence[Post] = (), outages: Sequence[str] = (), **settings: object
) -> ApiActor:
    facts = ModelFacts(
        path=str(tmp_path), name="m", max_position=64, vocab_size=320, eos_token_ids=(2,), checkpoint_dtype="float32"
    )
    config = make_config(**settings)
    return ApiActor(
        resolve(config, facts, MachineFacts(num_cores=1)),
        resolve_http(config, (), ()),
        http_fd=http_fd,
        engines=engines,
        outages=outages,
    )


def observers(actor: ApiActor) -> list[Observer]:
    return actor._observers(actor._trace(actor._config))


def test_ended_requests_are_logged_only_if_enabled(tmp_path: Path) -> None:
    assert observers(make_actor(tmp_path)) == []
    assert observers(make_actor(tmp_path, enable_log_requests=True)) == [log_request]


def test_tracing_without_its_packages_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "pagewire.api.gateway.tracing", raising=False)
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    actor = make_actor(tmp_path, otlp_traces_endpoint="http://127.0.0.1:4318")
    with pytest.raises(ConfigError, match=r"pip install 'pagewire\[otel\]'"):
        observers(actor)


def test_health_says_what_a_replacement_waits_for(tmp_path: Path) -> None:
    async def scenario() -> None:
        actor = make_actor(tmp_path, socket.socket().detach())
        actor.start(lambda receiver, message: None)
        actor.handle([Reset(2, 2, ("worker",), "worker was lost.")])
        actor.handle([Ping({}, "waiting for a node for worker: Ray has no room")])
        told = str(actor._complaint_of_model(0))
        assert told.startswith("worker was lost. ") and told.endswith(
            "It is waiting for a node for worker: Ray has no room."
        )
        actor.handle([Ping()])
        assert str(actor._complaint_of_model(0)).endswith("requests wait until it is replaced.")
        actor._socket.close()

    asyncio.run(scenario())


@pytest.mark.parametrize("endpoint", ["localhost:4317", "ftp://host", "http://", ""])
def test_the_trace_endpoint_must_be_an_address(tmp_path: Path, endpoint: str) -> None:
    with pytest.raises(ConfigError, match="--otlp-traces-endpoint must be an address"):
        make_actor(tmp_path, otlp_traces_endpoint=endpoint)


def test_a_failed_engine_is_unhealthy_while_it_answers_its_last_requests(tmp_path: Path) -> None:
    async def scenario() -> None:
        actor = make_actor(tmp_path, socket.socket().detach())
        actor.start(lambda receiver, message: None)
        submits = [Submit(0, 1, IdsPrompt(ids_to_bytes([1])), Sampling(), Limits(), TextSpec())]
        stream = actor._served[0].gateway.submit(submits)
        actor.handle([Stop(60.0, "SIGTERM")])
        stopping = asyncio.ensure_future(actor.stop(60.0))
        await asyncio.sleep(0)
        assert actor._complaint_of_model(0) is None, "a draining server is healthy"
        actor.handle([Stop(0.0, "The engine has failed.", is_failure=True)])
        assert actor._complaint_of_model(0) == "The engine has failed."
        with pytest.raises(EngineFailed, match="has failed"):
            await anext(stream)
        await asyncio.wait_for(stopping, 10.0)  # and not the 60 s that it drains for
        actor._socket.close()

    asyncio.run(scenario())


def test_a_new_process_sends_nothing_to_an_engine_that_is_down(tmp_path: Path) -> None:
    async def scenario() -> None:
        posted: list[tuple[int, object]] = []

        def post(engine: int, receiver: str, message: object) -> None:
            posted.append((engine, message))

        actor = make_actor(
            tmp_path, socket.socket().detach(), [partial(post, 0), partial(post, 1)], ["It has ended.", ""]
        )
        actor.start(lambda receiver, message: None)
        gateway = actor._served[0].gateway
        submits = [Submit(0, 1, IdsPrompt(ids_to_bytes([1])), Sampling(), Limits(), TextSpec())]
        for _ in range(3):
            gateway.submit(submits)
        asking = asyncio.create_task(gateway.describe_tokenizer())
        await asyncio.sleep(0)
        assert [engine for engine, _ in posted] == [1] * 4 and isinstance(posted[-1][1], Describe)
        assert actor._complaint_of_model(0) is None
        assert [engine.is_able for engine in gateway.engines] == [False, True]
        actor.handle([Restored(1, 0)])
        gateway.submit(submits)
        assert posted[-1][0] == 0
        asking.cancel()
        actor._socket.close()

    asyncio.run(scenario())
