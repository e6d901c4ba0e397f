"""Settings that several engines of one launch cannot have, what each engine is given, and what becomes of engines that
end, without processes."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from harness import run, split_settings
from msgspec.structs import replace
from waiting import until_async

from pagewire.config.config import ServerConfig
from pagewire.errors import ConfigError
from pagewire.procs.engines import MAX_FAILURES, EnginePart, Engines, of_engine
from pagewire.procs.listening import Listening
from pagewire.procs.shared_apis import SharedApis
from pagewire.procs.supervisor import Supervisor
from pagewire.procs.weight_memory import close_segments, new_segments


class IdlePart(EnginePart):
    """It starts no processes, and ends when it is told to."""

    def __init__(self, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self.number = self._engine
        self.end = asyncio.Event()

    def on_signal(self, signum: signal.Signals) -> None:
        self.end.set()

    async def run(self) -> int:
        await self.end.wait()
        close_segments(self._weight_fds)
        return 0


class IdleApis(SharedApis):
    """They have no processes either, and something open at an engine until `may_vacate`."""

    def __init__(self, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self.may_vacate = asyncio.Event()
        self.num_asked = 0  # to vacate

    async def run(self) -> int:
        await asyncio.Event().wait()
        return 0

    async def vacate(self, engine: int, within_s: float) -> None:
        self.num_asked += 1
        await self.may_vacate.wait()


class IdleEngines(Engines):
    make_part = IdlePart

    @property
    def apis(self) -> IdleApis:
        assert isinstance(self._apis, IdleApis)
        return self._apis

    def unfinished(self, number: int) -> list[Supervisor]:
        """The parts of an engine that run."""
        return [
            part
            for part, running in self._running.items()
            if isinstance(part, IdlePart) and part.number == number and not running.done()
        ]

    @asynccontextmanager
    async def begun(self, folder: Path) -> AsyncIterator[None]:
        """All engines are ready and clients can connect, as after a while in `run`."""
        self._folders = [folder / str(number) for number in range(self._num)]
        self._weight_fds = new_segments(self._config.engine)
        self._apis = IdleApis(
            self._config,
            folder=folder,
            listening=self._listening,
            engines=self._mailboxes,
            on_lost=self._on_lost_apis,
            on_swap=None,
            notes=list,
        )
        self._parts = [self._begin(number) for number in range(self._num)]
        self._run(self._apis)
        for part in self._parts:
            part.is_ready.set()
        self._is_open = True
        watching = asyncio.ensure_future(self._watch())
        try:
            yield
        finally:
            for part in self._parts:
                part.on_signal(signal.SIGTERM)
            watching.cancel()
            await asyncio.gather(*(self._running[part] for part in self._parts))
            self._running[self._apis].cancel()
            close_segments(self._weight_fds)

    async def fail(self, number: int) -> None:
        """One of the engines ends by itself. Returns when it is started again or given up."""
        before, num = self._parts[number], len(self._failures)
        assert isinstance(before, IdlePart)
        before.end.set()
        await until_async(lambda: len(self._failures) > num, "its end is noticed")


@pytest.fixture
def engines() -> Iterator[IdleEngines]:
    """Two of them."""
    engine, http = split_settings({"data_parallel_size": 2, "kernels": "compiled"})
    listening = Listening(http.listen)
    yield IdleEngines(ServerConfig(engine=engine, http=http), listening=listening)
    listening.close()


@pytest.mark.parametrize(
    ("field", "value"),
    [("client_address", "ipc:///x"), ("record_trace", "x"), ("kv_connector", ("host,size=1G", "disk,path=x"))],
)
def test_settings_for_one_engine_are_refused_for_several(field: str, value: Any) -> None:
    engine, http = split_settings({field: value})
    listening = Listening(http.listen)
    try:
        with pytest.raises(ConfigError, match=field.replace("_", "-")):
            Engines(ServerConfig(engine=engine, http=http), listening=listening)
    finally:
        listening.close()


def test_each_engine_has_cpus_and_addresses_of_its_own() -> None:
    engine, _ = split_settings({"kv_events": "tcp://127.0.0.1:5557", "kv_events_replay": "ipc:///run/replay"})
    engine = replace(engine, tensor_parallel_size=2, data_parallel_size=2, cpu_sets=((0,), (1,), (2,), (3,)))
    first, second = (of_engine(engine, number) for number in range(2))
    assert (first.engine_number, first.cpu_sets, first.kv_events) == (0, ((0,), (1,)), "tcp://127.0.0.1:5557")
    assert (second.engine_number, second.cpu_sets) == (1, ((2,), (3,)))
    assert (second.kv_events, second.kv_events_replay) == ("tcp://127.0.0.1:5558", "ipc:///run/replay.1")


def test_a_new_api_process_is_told_which_engines_are_down(engines: IdleEngines, tmp_path: Path) -> None:
    async def work() -> None:
        async with engines.begun(tmp_path):
            assert [told.reason for told in engines._mailboxes()] == ["", ""]
            await engines.fail(0)
            assert [told.reason for told in engines._mailboxes()] == ["It ended with exit code 0.", ""], "it loads"
            engines._parts[0].is_ready.set()
            assert [told.reason for told in engines._mailboxes()] == ["", ""]
            for _ in range(MAX_FAILURES):
                await engines.fail(0)
            assert engines._running[engines._parts[0]].done(), "it is given up"
            assert [told.reason for told in engines._mailboxes()] == ["It ended with exit code 0.", ""]

    run(work())


def test_before_clients_can_connect_engines_that_load_are_not_down(engines: IdleEngines, tmp_path: Path) -> None:
    async def work() -> None:
        async with engines.begun(tmp_path):
            engines._is_open = False
            engines._parts[0].is_ready.clear()
            assert [told.reason for told in engines._mailboxes()] == ["", ""], "the first `Restored` is not sent"
            engines._is_open = True

    run(work())


def test_an_engine_that_fails_while_it_is_vacated_is_restarted_once_more(
    engines: IdleEngines, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async def work() -> None:
        async with engines.begun(tmp_path):
            engines.on_hangup()
            await until_async(lambda: engines.apis.num_asked == 1, "engine 0 is vacated")
            await engines.fail(0)
            (failed,) = engines.unfinished(0)
            engines.apis.may_vacate.set()
            await until_async(lambda: failed not in engines.unfinished(0), "what has started meanwhile ends")
            await until_async(lambda: engines.unfinished(0), "and another one starts")
            assert engines.unfinished(0) == [engines._parts[0]], "two in one folder"
            engines._parts[0].is_ready.set()
            await until_async(
                lambda: engines.apis.num_asked == 2 and not engines._parts[1].is_ready.is_set(), "the next"
            )
            engines._parts[1].is_ready.set()
            assert engines._restarting is not None
            await engines._restarting
            assert engines.unfinished(1) == [engines._parts[1]]

    run(work())
    assert "every engine was restarted" in capsys.readouterr().err


def test_an_engine_that_is_given_up_while_it_is_vacated_is_restarted(engines: IdleEngines, tmp_path: Path) -> None:
    async def work() -> None:
        async with engines.begun(tmp_path):
            engines.on_hangup()
            await until_async(lambda: engines.apis.num_asked == 1, "engine 0 is vacated")
            for _ in range(MAX_FAILURES + 1):
                await engines.fail(0)
            given_up, epoch = engines._parts[0], engines._epochs[0]
            assert not engines.unfinished(0)
            engines.apis.may_vacate.set()
            await until_async(lambda: engines._parts[0] is not given_up, "it starts again")
            assert engines.unfinished(0) == [engines._parts[0]] and engines._epochs[0] == epoch, "it was lost once"
            assert engines._restarting is not None
            engines._restarting.cancel()

    run(work())


def test_weights_are_shared_also_when_an_engine_is_given_up(engines: IdleEngines, tmp_path: Path) -> None:
    async def work() -> None:
        async with engines.begun(tmp_path):
            for _ in range(MAX_FAILURES + 1):
                await engines.fail(0)
            same = replace(engines._config.engine, max_num_seqs=3)
            shared = engines.weights_for(same)
            assert shared and [os.fstat(fd) for fd in shared] == [os.fstat(fd) for fd in engines._weight_fds]
            close_segments(shared)
            assert engines.weights_for(replace(same, dtype="bfloat16")) == []

    run(work())
