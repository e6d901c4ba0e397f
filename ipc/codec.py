"""Bytes to messages and back: one encoder, and one typed decoder for each mailbox.

Only the closed unions of `messages` decode; there are no extension types and nothing is ever pickled.
"""

from typing import Generic, TypeVar

import msgspec

from .client_messages import ToClient, ToPort
from .messages import Message

DecodeError = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, ValueError)
"""What `Decoder.decode` may raise on bad bytes."""

M = TypeVar("M")

_encoder = msgspec.msgpack.Encoder()


def encode(message: Message | ToClient | ToPort) -> bytes:
    """The message as msgpack."""
    return _encoder.encode(message)


class Decoder(Generic[M]):
    """Decodes the union of messages that one mailbox accepts."""

    def __init__(self, accepts: object) -> None:
        self._decoder: msgspec.msgpack.Decoder[M] = msgspec.msgpack.Decoder(accepts)

    def decode(self, data: bytes | memoryview) -> M:
        """Raises one of `DecodeError` if the bytes are no message of this mailbox."""
        return self._decoder.decode(data)
