"""The outgoing messages of one actor's process: an outbox for each receiver that the topology allows.

With several api processes, the rid of a message determines which of them gets it; messages without a rid go to all,
and say which engine they are about. With its `Pong`, a process has receivers on other machines find out whether they
have all that it sent.
"""

from collections.abc import Mapping

from msgspec.structs import replace

from ..ipc.messages import RID_BITS, Message, Pong, Pulse, Slept, Snapshot, TextBatch
from ..ipc.zmq_channel import ZmqContext, ZmqOutbox
from .topology import apis, link, receivers


class Mailman:
    """The outboxes. An engine that serves only `EngineClient`s has no api and no detokenizer: messages for them are
    dropped."""

    def __init__(
        self, name: str, addresses: Mapping[str, str], context: ZmqContext, *, num_ranks: int, num_apis: int,
        num_stages: int = 1, engine: int = 0,
    ) -> None:  # fmt: skip
        """`engine`: the number of the one that the receivers belong to, or the sender if they are api processes."""
        self._engine = engine
        self._outboxes: dict[str, ZmqOutbox] = {
            receiver: context.outbox(addresses[receiver], link(name, receiver), engine=engine, sender=name)
            for receiver in receivers(name, num_ranks, num_apis, num_stages)
            if receiver in addresses
        }
        self._absent = {"api", "detokenizer"} - addresses.keys()
        self._apis = [self._outboxes[api] for api in apis(num_apis) if api in self._outboxes]

    def post(self, receiver: str, message: Message) -> None:
        if receiver in self._absent:
            return
        if receiver == "api":
            self._post_apis(message)
        else:
            self._outboxes[receiver].send(message)
            if receiver == "supervisor" and isinstance(message, Pong):
                for outbox in self._outboxes.values():
                    outbox.mark()

    def _post_apis(self, message: Message) -> None:
        num = len(self._apis)
        match message:
            case TextBatch() if num == 1:
                self._apis[0].send(message)
            case TextBatch(chunks=chunks):
                for index, api in enumerate(self._apis):
                    if own := tuple(chunk for chunk in chunks if api_of(chunk.rid, num) == index):
                        api.send(TextBatch(own))
            case Snapshot() | Pulse() | Slept():
                about = replace(message, engine=self._engine) if self._engine else message
                for api in self._apis:
                    api.send(about)
            case _:
                self._apis[api_of(message.rid, num)].send(message)  # type: ignore[union-attr]  # all others have one


def api_index(index: int, epoch: int, num_apis: int) -> int:
    """The high bits of the rids of an api process, above `RID_BITS`; a replacement (`epoch` + 1) has other ones."""
    return epoch * num_apis + index


def api_of(rid: int, num_apis: int) -> int:
    """The index of the api process that a rid belongs to."""
    return (rid >> RID_BITS) % num_apis
