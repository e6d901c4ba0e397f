"""Numbered frames: what a broken connection loses is found, whatever was lost and wherever the epochs end."""

import random
from collections.abc import Iterator

import pytest
from proxy import Proxy
from waiting import until

from pagewire.ipc.epochs import Epochs, Link
from pagewire.ipc.gaps import Gaps, Numbers
from pagewire.ipc.messages import Cancel, Hidden, Reset, ToCore, ToWorker
from pagewire.ipc.zmq_channel import ZmqContext, ZmqInbox, ZmqOutbox
from pagewire.tools.servers import free_port

HEADERS = [Epochs(epoch).header(Link.CHAIN) for epoch in range(1, 4)]


class Mailbox:
    """What one mailbox takes in."""

    def __init__(self) -> None:
        self.lost: list[str] = []
        self.taken: list[bytes] = []
        self._gaps = Gaps(self.lost.append)

    def take(self, frame: bytes) -> None:
        start = self._gaps.begin_of_message(frame)
        if start is not None:
            self.taken.append(frame[start:])


def sent(numbers: Numbers, header: bytes, message: bytes) -> bytes:
    frame = numbers.head(header) + message
    numbers.count()
    return frame


@pytest.mark.parametrize("seed", range(200))
def test_every_loss_is_found_and_nothing_after_it_is_taken(seed: int) -> None:
    """Random frames and marks of two senders in three epochs, of which some are lost."""
    chance = random.Random(seed)
    mailbox = Mailbox()
    senders = {name: Numbers(name) for name in ("worker", "worker-1")}
    for header in HEADERS:
        for sender, numbers in senders.items():
            messages = [f"{sender} {i}".encode() for i in range(chance.randrange(1, 9))]
            frames = [sent(numbers, header, message) for message in messages]
            mark = numbers.mark(header)
            assert mark is not None
            lost = [i for i in range(len(frames)) if chance.random() < 0.1]
            mailbox.lost.clear()
            mailbox.taken.clear()
            for i, frame in enumerate(frames):
                if i not in lost:
                    mailbox.take(frame)
            mailbox.take(mark)
            mailbox.take(mark)
            assert mailbox.lost == ([sender] if lost else []), seed
            assert mailbox.taken == messages[: min(lost, default=len(messages))], seed


def test_a_message_that_could_not_be_sent_leaves_no_gap() -> None:
    mailbox, numbers = Mailbox(), Numbers("core")
    assert numbers.mark(HEADERS[0]) is None, "nothing was sent"
    numbers.head(HEADERS[0])
    mailbox.take(sent(numbers, HEADERS[0], b"x"))
    assert mailbox.taken == [b"x"] and numbers.mark(HEADERS[1]) is None, "nothing was sent in the next epoch"


@pytest.mark.parametrize("frame", [HEADERS[0], HEADERS[0] + bytes(8), HEADERS[0] + bytes(8) + b"\7worker"])
def test_a_frame_without_number_or_sender_is_malformed(frame: bytes) -> None:
    with pytest.raises(ValueError, match=r"it has no (number|sender)"):
        Mailbox().take(frame)


class Ends:
    """A sender whose connection to a mailbox a test can cut."""

    def __init__(self, proxy: Proxy) -> None:
        self.proxy = proxy
        self.lost: list[str] = []
        self._epochs = Epochs(), Epochs()
        self._contexts = [ZmqContext(epochs=epochs) for epochs in self._epochs]
        self.inbox: ZmqInbox[object] = self._contexts[0].inbox(
            f"tcp://127.0.0.1:{proxy.target}", ToCore, on_gap=self.lost.append
        )
        self.outbox: ZmqOutbox = self._contexts[1].outbox(f"tcp://127.0.0.1:{proxy.port}", sender="api")
        self.taken: list[object] = []

    def arrived(self) -> list[object]:
        self.taken += self.inbox.drain()
        return self.taken

    def has_noticed_by_a_mark(self) -> bool:
        self.outbox.mark()
        return bool(self.arrived() or self.lost)

    def begin_epoch(self, number: int) -> None:
        """Both ends have had their `Reset`."""
        for epochs in self._epochs:
            epochs.advance(Reset(number, 1, (), "A connection broke."))
        self.lost.clear()
        self.taken.clear()

    def close(self) -> None:
        for context in self._contexts:
            context.close()


@pytest.fixture
def ends() -> Iterator[Ends]:
    with Proxy(free_port()) as proxy:
        ends = Ends(proxy)
        yield ends
        ends.close()


def test_a_cut_connection_is_noticed_with_the_next_message_or_mark(ends: Ends) -> None:
    ends.outbox.send(Cancel((1,)))
    until(lambda: ends.arrived() == [Cancel((1,))], "the first message arrives")
    for epoch, is_last in ((2, False), (3, True)):
        ends.taken.clear()
        ends.proxy.partition(up=True, down=False)
        ends.outbox.send(Cancel((2,)))
        until(lambda: ends.proxy.num_held > 0, "the message has left its sender")
        ends.proxy.cut()
        ends.proxy.heal()
        if is_last:
            until(ends.has_noticed_by_a_mark, "the mark shows what was lost")
        else:
            ends.outbox.send(Cancel((3,)))
            until(lambda: bool(ends.arrived() or ends.lost), "the next message shows what was lost")
        assert ends.lost == ["api"] and not ends.taken
        ends.begin_epoch(epoch)
        ends.outbox.send(Cancel((epoch,)))
        until(lambda epoch=epoch: ends.arrived() == [Cancel((epoch,))], "the next epoch begins anew")  # type: ignore[misc]


def test_a_connection_that_breaks_while_nothing_is_under_way_loses_nothing(ends: Ends) -> None:
    for i in range(3):
        ends.outbox.send(Cancel((i,)))
        until(lambda i=i: len(ends.arrived()) == i + 1, "it arrives")  # type: ignore[misc]
        ends.proxy.cut()
        ends.proxy.heal()
        ends.outbox.mark()
    ends.outbox.send(Cancel((3,)))
    until(lambda: ends.arrived() == [Cancel((i,)) for i in range(4)], "all have arrived")
    assert not ends.lost and ends.inbox.num_undecodable == 0


def test_a_mailbox_without_an_owner_for_gaps_fails(ends: Ends) -> None:
    context = ZmqContext()
    address = f"tcp://127.0.0.1:{free_port()}"
    inbox: ZmqInbox[object] = context.inbox(address, ToWorker)
    outbox = context.outbox(address, Link.DEVICE, sender="core")
    hidden = Hidden(1, width=2, data=b"12345678")
    outbox.send(hidden)
    assert inbox.wait(30.0) and inbox.drain() == [hidden]
    header = Epochs().header(Link.DEVICE)
    outbox.send_bytes(header + b"\5" + bytes(7) + b"\4core")  # as if messages 2 to 5 had been lost
    until(lambda: inbox.wait(0.1), "the mark arrives")
    with pytest.raises(ConnectionError, match="messages of core were lost"):
        inbox.drain()
    context.close()
