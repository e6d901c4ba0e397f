"""The protocol in which instances exchange KV blocks, over ZeroMQ: ipc:// on one machine, tcp:// with CURVE keys.

One asks (DEALER), the other answers from the blocks that it keeps (ROUTER). Blocks are identified by their keys alone,
so an answer is right for every asker with equal keys. Messages are msgpack arrays; keys are concatenated, 32 bytes
each. If the cache has several groups, `Lookup` asks with the keys of blocks and `Found` answers for all groups; `Want`
names items (`engine/core/kv_connector.py`), whose names are the keys if there is one group.

    asker    Hello, Lookup           server   Welcome, Found
    asker    Want, Credit, Have,     server   Coming, Piece (two frames: header, content), Gone
             Done

An instance of several ranks asks each rank of the other one, which answers for itself, and wants of rank r on its own
rank r what all of them have.

A server sends no byte of blocks without credit. Of a `Want` it sends what it has, in the order of the names, and what
it is computing as soon as that is there; it forgets the want when its lease ends. A block that is being computed comes
layer group by layer group, of several blocks in one piece, and is whole with the last one, which is sent when the pass
is known to be good. If it has to be computed again, its parts begin at 0 again.

An asker whose connection breaks connects again and repeats its `Want` with a bitmap of what it has whole. Every
`Lookup` and `Want` carries the digest of the asker's layout; a server with another one answers `Welcome`, from which
the asker sees what differs.
"""

from hashlib import sha256
from typing import Annotated
from zlib import crc32

import msgspec
from msgspec import Meta, Struct

from .base import ConnectorFacts
from .options import MAX_WAIT_MS

VERSION = 5  # of this protocol
KEY_BYTES = 32
MAX_KEYS = 1 << 16  # in one message: a prompt of a million tokens
MAX_REQUEST_BYTES = MAX_KEYS * KEY_BYTES + MAX_KEYS // 8 + 4096
PIECE_BYTES = 1 << 20  # at most, of a piece; a larger block is sent in several
CREDIT_BYTES = 32 << 20  # that an asker gives a server: what may be under way or unread at once
LEASE_MS = 10_000  # for which a server remembers a want without a word from its asker
MAX_REPLY_BYTES = MAX_REQUEST_BYTES + (16 << 20)  # of one message; `Found` with the states of a hybrid is the largest

_Count = Annotated[int, Meta(ge=0, le=1 << 40)]


class Layout(Struct, frozen=True, array_like=True):
    """What must be equal on both ends. `version` comes first in every version of the protocol."""

    version: int
    model_key: bytes
    block_size: int  # positions
    block_bytes: int  # of a page
    num_groups: int
    num_ranks: int = 1
    rank: int = 0  # whose part of each page it is

    @classmethod
    def of(cls, facts: ConnectorFacts) -> "Layout":
        return cls(
            VERSION, facts.model_key, facts.block_size, facts.block_bytes, facts.num_groups, facts.num_ranks, facts.rank
        )

    @property
    def digest(self) -> bytes:
        """16 bytes."""
        return sha256(msgspec.msgpack.encode(self)).digest()[:16]

    def difference(self, theirs: "Layout") -> str | None:
        """Why blocks of the other instance are of no use here; None: they are."""
        if theirs.version != self.version:
            return f"it speaks version {theirs.version} of the protocol, this instance version {self.version}"
        if theirs.block_size != self.block_size:
            return f"its blocks have {theirs.block_size} positions, this instance's {self.block_size}"
        if theirs.num_ranks != self.num_ranks:
            return (
                f"it has {theirs.num_ranks} ranks, this instance {self.num_ranks}; start both with the same "
                "--tensor-parallel-size and --pipeline-parallel-size"
            )
        if theirs.rank != self.rank:
            return f"its rank {theirs.rank} answers where rank {self.rank} should; ranks use the ports from serve=… on"
        if (theirs.block_bytes, theirs.num_groups) != (self.block_bytes, self.num_groups):
            return (
                f"its cache has {theirs.num_groups} groups with pages of {theirs.block_bytes} bytes, this instance's "
                f"{self.num_groups} with {self.block_bytes}: another model, or another --kv-cache-dtype"
            )
        if theirs.model_key != self.model_key:
            return "it serves another model, or the same one with another type of KV"
        return None


class Hello(Struct, frozen=True, array_like=True, tag=True):
    """Asks who is there."""

    layout: Layout


class Lookup(Struct, frozen=True, array_like=True, tag=True):
    """Asks how many of these blocks the peer has."""

    id: int
    layout: bytes  # `Layout.digest`
    keys: bytes
    wait_ms: Annotated[int, Meta(ge=0, le=MAX_WAIT_MS)]  # how long to wait for blocks that are being computed
    behind: bytes = b""  # the key before the first of `keys`, or the root, if states are asked for
    is_expected: bool = False  # the peer is about to compute the blocks, if it does not already


class Want(Struct, frozen=True, array_like=True, tag=True):
    """Asks for these blocks, or items of several groups. `id` is the asker's; a second one with it replaces it."""

    id: int
    layout: bytes
    names: bytes
    have: bytes  # a bit for each name, the lowest of the first byte first: what the asker has already; may be shorter
    credit: _Count  # bytes, added to that of the connection
    lease_ms: Annotated[int, Meta(ge=1, le=MAX_WAIT_MS)]
    reads: bool = False  # pieces may be places in the server's memory, which the asker reads by NIXL


class Credit(Struct, frozen=True, array_like=True, tag=True):
    """The asker has read so many bytes more. It renews all leases of the connection."""

    num_bytes: _Count


class Have(Struct, frozen=True, array_like=True, tag=True):
    """Renews the lease of a want."""

    id: int


class Done(Struct, frozen=True, array_like=True, tag=True):
    """The asker wants nothing more of this."""

    id: int


class Welcome(Struct, frozen=True, array_like=True, tag=True):
    """Answers `Hello`, and every message of an asker whose layout differs."""

    layout: Layout


class Found(Struct, frozen=True, array_like=True, tag=True):
    """Answers `Lookup`: of full attention, if the model has it, the peer has the first `num` blocks. With `is_coming`
    more is being computed, and another answer follows within `wait_ms`. In that one `num_coming` more blocks are being
    computed, and perhaps some of `names` and `states`, if progress was seen."""

    id: int
    num: int
    is_coming: bool = False
    names: bytes = b""  # of the items of other groups that it has, if there are some, and of beginnings of blocks
    states: tuple[tuple[bytes, bytes, int], ...] = ()  # key that it stands behind, its key, positions between
    num_coming: int = 0


class Coming(Struct, frozen=True, array_like=True, tag=True):
    """Answers `Want`: how many items the peer has, how many more it is computing."""

    id: int
    num_there: int
    num_coming: int
    agent: bytes = b""  # of NIXL: what an asker that reads needs to know of it; empty: all pieces have contents


class Piece(Struct, frozen=True, array_like=True, tag=True):
    """The head of a piece: whole items, or the same part of each of some items of one size, in order. Its content is
    the next frame."""

    id: int  # of the want
    first: int  # number of the first item in the want's names
    num: int  # items
    offset: int  # bytes of each item before it; the parts of an item follow each other, and 0 begins it anew
    checksum: int  # see `checksum`
    places: tuple[tuple[int, int], ...] = ()  # where it is: addresses and bytes; no frame follows


class Gone(Struct, frozen=True, array_like=True, tag=True):
    """The peer has sent all it could: the rest of the items is neither there nor being computed."""

    id: int


Request = Hello | Lookup | Want | Credit | Have | Done
Reply = Welcome | Found | Coming | Piece | Gone
encode = msgspec.msgpack.Encoder().encode
decode_request = msgspec.msgpack.Decoder(Request).decode
decode_reply = msgspec.msgpack.Decoder(Reply).decode
MALFORMED = (msgspec.MsgspecError, ValueError, RecursionError)  # the last two: bad UTF-8, deep nesting


def checksum(names: bytes, offset: int, content: bytes | memoryview) -> int:
    """CRC-32 over the names of a piece's items, its offset and its bytes: finds damaged and mistaken blocks. It is no
    protection against an attacker, which the keys are."""
    return crc32(content, crc32(names + offset.to_bytes(8, "little")))


def split_keys(keys: bytes) -> list[bytes]:
    """The keys of a message. Raises ValueError if the length is no multiple of a key's."""
    if len(keys) % KEY_BYTES:
        raise ValueError(f"{len(keys)} bytes are no whole number of keys")
    return [keys[i : i + KEY_BYTES] for i in range(0, len(keys), KEY_BYTES)]


def bitmap(numbers: "set[int]", num: int) -> bytes:
    """A bit for each of `num` items: whether its number is in the set."""
    bits = bytearray(-(-num // 8))
    for number in numbers:
        bits[number >> 3] |= 1 << (number & 7)
    return bytes(bits)


def has_bit(bits: bytes, number: int) -> bool:
    return number >> 3 < len(bits) and bool(bits[number >> 3] >> (number & 7) & 1)
