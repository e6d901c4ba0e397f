"""Peers with other keys are named; those that hold the key, and those that are none of ours, are not."""

import asyncio
import socket
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from waiting import until

from pagewire.ipc.refusals import ZmqRefusals
from pagewire.ipc.zmq_channel import ZmqContext, ZmqRouter, read_keys


class Guarded:
    """An address that watches whom it refuses."""

    def __init__(self, folder: Path) -> None:
        self.context = ZmqContext(read_keys(folder / "ours"))
        self.router: ZmqRouter = self.context.router("tcp://127.0.0.1:0")
        self.refusals: ZmqRefusals = self.router.refusals()
        self.found: list[str] = []

    def refused(self) -> list[str]:
        self.refusals._monitor.poll(20)  # who it was is known only while the connection lasts
        self.found += self.refusals.look()
        return self.found

    def close(self) -> None:
        self.router.close()
        self.context.close()


@pytest.fixture
def guarded(tmp_path: Path) -> Iterator[Guarded]:
    guarded = Guarded(tmp_path)
    yield guarded
    guarded.close()


def test_a_peer_with_another_key_is_named(guarded: Guarded, tmp_path: Path) -> None:
    async def first_refused() -> list[str]:
        """A peer has its name only as long as its connection, so each is looked at as soon as it comes."""
        loop = asyncio.get_running_loop()
        refused: asyncio.Future[list[str]] = loop.create_future()

        def look() -> None:
            if (hosts := guarded.refusals.look()) and not refused.done():
                refused.set_result(hosts)

        guarded.refusals.subscribe(loop, look)
        async with asyncio.timeout(60):
            return await refused

    with closing(ZmqContext(read_keys(tmp_path / "theirs"))) as stranger:
        stranger.dealer(guarded.router.address)
        assert asyncio.run(first_refused())[0] == "127.0.0.1"
        guarded.refusals.close()


def test_friends_and_programs_that_speak_something_else_are_not_named(guarded: Guarded, tmp_path: Path) -> None:
    host, port = guarded.router.address.removeprefix("tcp://").split(":")
    for sent in (b"", b"GET / HTTP/1.1\r\n\r\n"):
        with socket.create_connection((host, int(port)), timeout=10.0) as probe:
            probe.sendall(sent)
    friend = ZmqContext(read_keys(tmp_path / "ours"))
    for _ in range(2):  # also one that leaves and comes back
        dealer = friend.dealer(guarded.router.address)
        dealer._socket.send(b"hello")
        until(guarded.router.receive, "the friend is heard")
        dealer.close()
    assert guarded.refused() == []
    friend.close()
