"""Keys for the content of KV blocks, so that equal prefixes can be found again.

A block's key is SHA-256 over its parent's key and its own token ids; the first parent is a root made of everything
else that the KV depends on. Equal keys therefore mean equal prefixes, from the first token on, of the same owner.
"""

from hashlib import sha256


def root_key(model: bytes, salt: bytes, adapter: bytes = b"") -> bytes:
    """The parent key of every first block: names the model, the adapter (none is supported yet) and, by `salt`, the
    owner of the prefix."""
    parts = (len(part).to_bytes(8, "little") + part for part in (model, adapter))
    return sha256(b"".join(parts) + salt).digest()


def regime_key(root: bytes, regime: int) -> bytes:
    """The parent key of the first block of a sequence in this regime (`Request.regime`): equal tokens have other KV in
    another regime, so none of their keys are equal."""
    return sha256(root + regime.to_bytes(1, "little")).digest() if regime else root


def args_key(root: bytes, args: bytes) -> bytes:
    """The parent key of the first block of requests with these arguments for a runner plugin, which may compute other
    KV for others."""
    return sha256(root + b"arguments" + args).digest() if args else root


def block_key(parent: bytes, ids: bytes) -> bytes:
    """The key of the block that follows `parent` and holds `ids`: int32 bytes of a block or of its beginning."""
    return sha256(parent + ids).digest()
