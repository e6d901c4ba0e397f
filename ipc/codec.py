"""Encoding and decoding of messages: one encoder, and one typed decoder for each mailbox.

Only the closed unions of `messages` decode. There are no extension types, and nothing is pickled.
"""

from typing import Generic, TypeVar

import msgspec

from .client_messages import ToClient, ToPort
from .control_messages import ToFollower, ToLead
from .file_messages import FromShare, ToShare
from .messages import Message

DecodeError = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, ValueError)
"""The errors of `Decoder.decode` on bad bytes."""

M = TypeVar("M")

_encoder = msgspec.msgpack.Encoder()


def encode(message: Message | ToClient | ToPort | ToLead | ToFollower | ToShare | FromShare) -> bytes:
    return _encoder.encode(message)


class Decoder(Generic[M]):
    """Decodes the union of messages that one mailbox accepts."""

    def __init__(self, accepts: object) -> None:
        self._decoder: msgspec.msgpack.Decoder[M] = msgspec.msgpack.Decoder(accepts)

    def decode(self, data: bytes | memoryview) -> M:
        """Raises one of `DecodeError`."""
        return self._decoder.decode(data)
