"""One suite for every kind of mailbox: order, batching, bad bytes, waking a loop and a plain thread."""

import asyncio
import logging
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pagewire.ipc.channel import Inbox, MemoryChannel
from pagewire.ipc.messages import Cancel, Ping, Stop, ToTokenizer
from pagewire.ipc.zmq_channel import (
    ZmqContext,
    ZmqInbox,
    read_keys,
)
from pagewire.tools.servers import free_port

DEADLINE_S = 30.0
Pair = tuple[Inbox[object], Callable[[], object]]  # the receiving end, and a maker of sending ends


@pytest.fixture(params=["memory", "zmq ipc", "zmq tcp", "zmq tcp with keys"])
def pair(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Pair]:
    if request.param == "memory":
        channel: MemoryChannel[object] = MemoryChannel(ToTokenizer)
        yield channel, lambda: channel
        return
    context = ZmqContext(read_keys(tmp_path / "key") if "keys" in request.param else None)
    address = f"ipc://{tmp_path}/box" if "ipc" in request.param else "tcp://127.0.0.1:*"
    inbox: ZmqInbox[object]
    if "ipc" in request.param:
        inbox = context.inbox(address, ToTokenizer)
    else:
        address = f"tcp://127.0.0.1:{free_port()}"
        inbox = context.inbox(address, ToTokenizer)
    yield inbox, lambda: context.outbox(address)
    inbox.close()
    context.close()


def receive(inbox: Inbox[object], num: int) -> list[object]:
    messages: list[object] = []
    while len(messages) < num:
        assert inbox.wait(DEADLINE_S), f"only {len(messages)} of {num} messages arrived"
        messages += inbox.drain()
    return messages


def test_messages_keep_their_order(pair: Pair) -> None:
    inbox, connect = pair
    outbox = connect()
    sent = [Cancel((i, i + 1)) for i in range(500)]
    for message in sent:
        outbox.send(message)  # type: ignore[attr-defined]
    assert receive(inbox, 500) == sent
    assert inbox.drain() == [] and not inbox.wait(0.001)


def test_several_senders_share_one_mailbox(pair: Pair) -> None:
    inbox, connect = pair
    for i in range(3):
        connect().send(Cancel((i,)))  # type: ignore[attr-defined]
    assert sorted(m.rids for m in receive(inbox, 3)) == [(0,), (1,), (2,)]  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "data", [b"", b"\xc1", b"\x91\xa4Nope", b"\xd9\x02\xff\xff", b"\x81\xa4type\xa4Ping", b"\x91" * 5000]
)
def test_bad_bytes_are_counted_logged_once_and_dropped(
    pair: Pair, data: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    inbox, connect = pair
    outbox = connect()
    with caplog.at_level(logging.WARNING, "pagewire.ipc"):
        for _ in range(3):
            outbox.send_bytes(data)  # type: ignore[attr-defined]
        outbox.send(Ping())  # type: ignore[attr-defined]
        assert receive(inbox, 1) == [Ping()]
    assert inbox.num_undecodable == 3 and len(caplog.records) == 1


def test_a_message_that_the_mailbox_does_not_accept_is_dropped(pair: Pair) -> None:
    from pagewire.ipc.messages import StopHit

    inbox, connect = pair
    outbox = connect()
    outbox.send(StopHit((1,)))  # type: ignore[attr-defined]
    outbox.send(Stop(1.0, "test"))  # type: ignore[attr-defined]
    assert receive(inbox, 1) == [Stop(1.0, "test")] and inbox.num_undecodable == 1


def test_a_loop_is_woken_for_every_batch(pair: Pair) -> None:
    inbox, connect = pair

    async def scenario() -> list[object]:
        messages: list[object] = []
        woken = asyncio.Event()
        outbox = connect()
        outbox.send(Cancel((0,)))  # type: ignore[attr-defined]  # before the loop subscribes
        inbox.subscribe(asyncio.get_running_loop(), woken.set)
        for i in range(1, 6):
            while len(messages) < i:
                await asyncio.wait_for(woken.wait(), DEADLINE_S)
                woken.clear()
                messages.extend(inbox.drain())
            outbox.send(Cancel((i,)))  # type: ignore[attr-defined]
        return messages

    assert [m.rids for m in asyncio.run(scenario())] == [(i,) for i in range(5)]  # type: ignore[attr-defined]


def test_a_plain_loop_is_woken_by_another_thread(pair: Pair) -> None:
    inbox, connect = pair
    sender = threading.Thread(target=lambda: connect().send(Ping()))  # type: ignore[attr-defined]
    sender.start()
    assert receive(inbox, 1) == [Ping()]
    sender.join()
