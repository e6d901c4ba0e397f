"""A hash that every router computes alike."""

import hashlib


def stable_hash(data: bytes) -> int:
    """A number below 2**64 that is the same in every process."""
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest())
