"""With several API processes, each gets the messages of its own requests."""

import tempfile
import uuid
from pathlib import Path

from proxy import Proxy
from waiting import until

from pagewire.ipc.messages import Accepted, Cancel, Chunk, Pong, Pulse, TextBatch, ToApi, ToCore
from pagewire.ipc.reports import HistogramCounts
from pagewire.ipc.zmq_channel import ZmqContext, ZmqInbox
from pagewire.procs.post import Mailman, api_index, api_of
from pagewire.tools.servers import free_port


def test_a_request_id_names_its_api_process_in_every_epoch() -> None:
    indices = {api_index(index, epoch, 3) for index in range(3) for epoch in range(1, 50)}
    assert len(indices) == 3 * 49
    assert all(api_of(api_index(i, epoch, 3) << 40 | 12345, 3) == i for i in range(3) for epoch in (1, 2, 49))


def test_output_goes_to_the_api_of_its_request_and_reports_go_to_all() -> None:
    context = ZmqContext()
    addresses = {
        name: f"ipc://{tempfile.gettempdir()}/pw-{uuid.uuid4().hex[:8]}"
        for name in ("api", "api-1", "core", "supervisor")
    }
    try:
        inboxes: list[ZmqInbox[object]] = [context.inbox(addresses[name], ToApi) for name in ("api", "api-1")]
        post = Mailman("detokenizer", addresses, context, num_ranks=1, num_apis=2).post
        rids = [api_index(i, 1, 2) << 40 for i in range(2)]
        pulse = Pulse("detokenizer", HistogramCounts((), (0,), 0.0))
        post("api", TextBatch((Chunk(rids[0], "a", b""), Chunk(rids[1], "b", b""), Chunk(rids[0], "c", b""))))
        post("api", Accepted(rids[1], 3))
        post("api", pulse)
        received: list[list[object]] = []
        for inbox, num in zip(inboxes, (2, 3), strict=True):
            messages: list[object] = []
            while len(messages) < num:
                assert inbox.wait(30.0)
                messages += inbox.drain()
            received.append(messages)
        assert received[0] == [TextBatch((Chunk(rids[0], "a", b""), Chunk(rids[0], "c", b""))), pulse]
        assert received[1] == [TextBatch((Chunk(rids[1], "b", b""),)), Accepted(rids[1], 3), pulse]
    finally:
        context.close()
        for address in addresses.values():
            Path(address.removeprefix("ipc://")).unlink(missing_ok=True)


def test_with_its_pong_a_process_lets_others_notice_that_its_last_message_was_lost(tmp_path: Path) -> None:
    lost: list[str] = []
    ours, theirs = ZmqContext(), ZmqContext()
    with Proxy(free_port()) as proxy:
        inbox: ZmqInbox[object] = theirs.inbox(f"tcp://127.0.0.1:{proxy.target}", ToCore, on_gap=lost.append)
        addresses = {
            "core": f"tcp://127.0.0.1:{proxy.port}",
            "api": f"ipc://{tmp_path}/api",
            "supervisor": f"ipc://{tmp_path}/s",
        }
        post = Mailman("tokenizer", addresses, ours, num_ranks=1, num_apis=1).post
        post("core", Cancel((1,)))
        until(lambda: inbox.drain() == [Cancel((1,))], "the first one arrives")
        before = proxy.num_passed
        post("supervisor", Pong("tokenizer"))
        until(lambda: proxy.num_passed > before, "the mark of the first one is through")
        proxy.partition(up=True, down=False)
        post("core", Cancel((2,)))
        until(lambda: proxy.num_held > 0, "the last one is under way")
        proxy.cut()
        proxy.heal()
        until(lambda: inbox.drain() or post("supervisor", Pong("tokenizer")) or bool(lost), "the core notices")
        assert lost == ["tokenizer"] and inbox.drain() == []
    ours.close()
    theirs.close()
