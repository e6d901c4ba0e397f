"""Watching a mailbox whose process is killed, frozen or busy, or has not started."""

import asyncio
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest
from waiting import until

from pagewire.ipc.messages import Leave, ToTokenizer
from pagewire.ipc.watch import ZmqWatch
from pagewire.ipc.zmq_channel import ZmqContext, ZmqInbox, read_keys
from pagewire.tools.servers import free_port

SILENCE_S = 1.0
IDLE = "inbox.wait(1.0)"
BUSY = "pass"  # holds the interpreter's lock, as the loading of a model does
Peer = Callable[[str], tuple[Callable[[], ZmqWatch], psutil.Process]]


@pytest.fixture
def context(tmp_path: Path) -> Iterator[ZmqContext]:
    context = ZmqContext(read_keys(tmp_path / "key"))
    yield context
    context.close()


@pytest.fixture(params=["ipc", "tcp with keys"])
def peer(context: ZmqContext, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Peer]:
    """Starts a process that has a mailbox and repeats `statement`. Returns what begins a watch over it once the process
    is up, and the process."""
    with ExitStack() as stack:

        def begin(statement: str) -> tuple[Callable[[], ZmqWatch], psutil.Process]:
            port = free_port()
            address = f"ipc://{tmp_path}/{port}" if request.param == "ipc" else f"tcp://127.0.0.1:{port}"
            program = f"""
                from pathlib import Path
                from pagewire.ipc.messages import ToTokenizer
                from pagewire.ipc.zmq_channel import ZmqContext, read_keys
                inbox = ZmqContext(read_keys(Path({str(tmp_path / "key")!r}))).inbox({address!r}, ToTokenizer)
                while True: {statement}
            """
            process = subprocess.Popen([sys.executable, "-c", textwrap.dedent(program)])
            stack.callback(process.wait)
            stack.callback(process.kill)

            def attempt() -> ZmqWatch | None:
                watch = context.watch(address, SILENCE_S)
                stack.callback(watch.close)
                until(lambda: looked(watch).is_up or watch.is_lost, "the process is up", 60)
                return watch if watch.is_up else None

            def watch() -> ZmqWatch:
                found = until(attempt, "the process is up and not lost at once", 60)
                assert found is not None
                return found

            return watch, psutil.Process(process.pid)

        yield begin


def looked(watch: ZmqWatch) -> ZmqWatch:
    watch.look()
    return watch


def received(inbox: ZmqInbox[object]) -> object:
    messages: list[object] = []
    while not messages:
        assert inbox.wait(30), "no message arrived"
        messages = inbox.drain()
    (message,) = messages
    return message


def test_a_killed_process_is_lost(peer: Peer) -> None:
    begin, process = peer(IDLE)
    watch = begin()
    process.kill()
    until(lambda: looked(watch).is_lost, "the killed process is lost", 30)
    assert not watch.is_up


def test_a_frozen_process_is_lost_and_a_busy_one_is_not(peer: Peer) -> None:
    watch_busy, _ = peer(BUSY)
    watch_idle, process = peer(IDLE)

    def busy_one_is_up() -> bool:
        """A machine with more to do may keep a busy process from its core for too long, but not each time."""
        busy, frozen = watch_busy(), watch_idle()
        process.suspend()
        until(lambda: looked(frozen).is_lost, "the frozen process is lost", 30)
        process.resume()
        return looked(busy).is_up

    assert any(busy_one_is_up() for _ in range(5)), "a busy process answers while it is busy"


def test_a_process_that_never_started_is_not_lost_and_one_that_restarts_stays_lost(context: ZmqContext) -> None:
    async def scenario() -> None:
        address = f"tcp://127.0.0.1:{free_port()}"
        watch = context.watch(address, 60.0)
        woken = asyncio.Event()
        watch.subscribe(asyncio.get_running_loop(), woken.set)

        async def until(condition: Callable[[], bool]) -> None:
            async with asyncio.timeout(30):
                while not condition():
                    await woken.wait()
                    woken.clear()
                    watch.look()

        await asyncio.wait_for(woken.wait(), 30)
        assert not looked(watch).is_up and not watch.is_lost
        inbox: ZmqInbox[object] = context.inbox(address, ToTokenizer)
        await until(lambda: watch.is_up)
        watch.send(Leave(("worker",)))
        assert received(inbox) == Leave(("worker",))
        inbox.close()
        await until(lambda: watch.is_lost)
        again: ZmqInbox[object] = context.inbox(address, ToTokenizer)
        watch.send(Leave(("core",)))
        assert received(again) == Leave(("core",)), "the socket connects again"
        assert looked(watch).is_lost and not watch.is_up
        again.close()
        watch.close()

    asyncio.run(scenario())
