"""Frames of another epoch: old ones are dropped, and early ones wait for the `Reset` to their epoch."""

import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from waiting import until

from pagewire.ipc.epochs import Epochs, Link, counter_of, first_epoch
from pagewire.ipc.messages import Accepted, Cancel, Ping, Reset, StepPlan, ToApi, ToCore, ToWorker
from pagewire.ipc.zmq_channel import ZmqContext, ZmqInbox


def reset(epoch: int, device: int = 1) -> Reset:
    return Reset(epoch, device, ("tokenizer",), "It died.")


@pytest.fixture
def address() -> str:
    return f"ipc://{tempfile.gettempdir()}/pw-{uuid.uuid4().hex[:8]}"


class Ends:
    """A mailbox, and processes of several epochs that send to it."""

    def __init__(self, address: str, accepts: object = ToCore) -> None:
        self.epochs = Epochs()
        self.context = ZmqContext(epochs=self.epochs)
        self.inbox: ZmqInbox[object] = self.context.inbox(address, accepts)
        self.address = address
        self.senders: list[ZmqContext] = []

    def sender(self, epochs: Epochs, link: Link = Link.CHAIN):  # type: ignore[no-untyped-def]
        context = ZmqContext(epochs=epochs)
        self.senders.append(context)
        return context.outbox(self.address, link)

    def drain(self, num: int) -> list[object]:
        messages: list[object] = []
        while len(messages) < num:
            assert self.inbox.wait(30.0)
            messages += self.inbox.drain()
        return messages

    def close(self) -> None:
        for context in (*self.senders, self.context):
            context.close()
        Path(self.address.removeprefix("ipc://")).unlink(missing_ok=True)


@pytest.fixture
def ends(address: str) -> Iterator[Ends]:
    ends = Ends(address)
    yield ends
    ends.close()


def test_frames_of_an_earlier_term_are_dropped_whatever_their_counter(ends: Ends) -> None:
    ends.epochs.advance(reset(first_epoch(1_800_000_000), first_epoch(1_800_000_000)))
    ends.sender(Epochs(first_epoch(1_799_999_999) + 7)).send(Cancel((1,)))
    ends.sender(Epochs(first_epoch(1_800_000_000))).send(Cancel((2,)))
    assert ends.drain(1) == [Cancel((2,))]
    until(lambda: ends.inbox.drain() == [] and ends.epochs.num_stale == 1, "the old frame is dropped")
    assert counter_of(first_epoch(1_800_000_000) + 6) == 7


def test_frames_of_an_earlier_epoch_are_dropped_and_counted(ends: Ends) -> None:
    supervisor, old = ends.sender(Epochs(), Link.CONTROL), ends.sender(Epochs())
    supervisor.send(reset(2))
    assert ends.drain(1) == [reset(2)]
    old.send(Cancel((1,)))
    new = ends.sender(Epochs(2))
    new.send(Cancel((2,)))
    assert ends.drain(1) == [Cancel((2,))]
    # Each sender has a queue of its own: the old one's message may be the last to arrive.
    until(lambda: ends.inbox.drain() == [] and ends.epochs.num_stale == 1, "the stale frame is counted")


def test_a_frame_of_a_later_epoch_waits_for_its_reset(ends: Ends) -> None:
    early, supervisor = ends.sender(Epochs(3)), ends.sender(Epochs(), Link.CONTROL)
    early.send(Cancel((3,)))
    supervisor.send(Ping())
    assert ends.drain(1) == [Ping()]
    supervisor.send(reset(2))
    assert ends.drain(1) == [reset(2)]
    supervisor.send(reset(3))
    assert ends.drain(2) == [reset(3), Cancel((3,))]


def test_a_reset_is_always_the_first_message_of_a_drain(ends: Ends) -> None:
    supervisor = ends.sender(Epochs(), Link.CONTROL)
    for message in (Ping(), reset(2), Ping(), reset(2), Ping()):
        supervisor.send(message)
    lists: list[list[object]] = []
    while sum(map(len, lists)) < 4:
        assert ends.inbox.wait(30.0)
        if messages := ends.inbox.drain():
            lists.append(messages)
            assert reset(2) not in messages[1:]
    # The second reset is of the same epoch and is dropped.
    assert [message for messages in lists for message in messages] == [Ping(), reset(2), Ping(), Ping()]
    assert ends.epochs.chain == 2 and not ends.inbox.has_more


def test_a_reset_of_the_chain_alone_keeps_frames_of_the_device(address: str) -> None:
    ends = Ends(address, ToWorker)
    try:
        plan = StepPlan(1, (), b"", b"", b"", b"", b"")
        core, supervisor = ends.sender(Epochs(), Link.DEVICE), ends.sender(Epochs(), Link.CONTROL)
        supervisor.send(reset(2))
        assert ends.drain(1) == [reset(2)]
        core.send(plan)
        assert ends.drain(1) == [plan]
        supervisor.send(reset(3, device=2))
        assert ends.drain(1) == [reset(3, device=2)]
        core.send(plan)
        supervisor.send(Ping())
        assert ends.drain(1) == [Ping()]
    finally:
        ends.close()


def test_each_engine_of_an_api_process_has_its_own_epochs(address: str) -> None:
    ends = Ends(address, ToApi)
    try:
        ends.epochs.join(1, 5, 5)
        first, second, third = (ends.sender(Epochs(chain, engine=number)) for number, chain in enumerate((1, 5, 1)))
        supervisor = ends.sender(Epochs(engine=1), Link.CONTROL)
        supervisor.send(Reset(6, 5, ("core",), "It died.", 1))
        assert ends.drain(1) == [Reset(6, 5, ("core",), "It died.", 1)]
        second.send(Accepted(2, 1))
        third.send(Accepted(3, 1))  # of an engine that this process does not serve
        first.send(Accepted(1, 1))
        assert ends.drain(1) == [Accepted(1, 1)]
        until(
            lambda: ends.inbox.drain() == [] and ends.epochs.num_stale == ends.inbox.num_undecodable == 1,
            "the frames of the old epoch and of the other engine are dropped",
        )
        own = ends.context.outbox(address, engine=1)
        own.send(Accepted(4, 1))
        assert ends.drain(1) == [Accepted(4, 1)], "what is sent to an engine has its epoch"
    finally:
        ends.close()


def test_malformed_frames_are_counted(ends: Ends) -> None:
    sender = ends.sender(Epochs())
    for data in (b"", b"\1\2", b"\x63\0\0\0\0rest"):
        sender.send_bytes(data)
    sender.send(Cancel((1,)))
    assert ends.drain(1) == [Cancel((1,))] and ends.inbox.num_undecodable == 3
