"""What was delivered of each sequence, so that an engine that has lost it can continue where its client is.

The api process is the engine's journal: every process behind it may die. A sequence is submitted again with the ids
that were delivered and the length of their text. The sampler's noise is keyed by seed and position, so the output
continues as it would have.
"""

from collections.abc import Iterator, Sequence
from hashlib import sha256

import msgspec
from msgspec.structs import replace

from ...ipc.messages import Chunk, Submit


class Entry:
    """One sequence. `submit` is its own: n = 1, with its own seed."""

    __slots__ = ("has_first", "ids", "num_chars", "submit")

    def __init__(self, submit: Submit) -> None:
        self.submit = submit
        # int32; with resume_chars < 0 the engine sends the resumed ids again, as a chunk
        self.ids = bytearray(submit.resume_ids if submit.resume_chars >= 0 else b"")
        self.num_chars = max(0, submit.resume_chars)
        self.has_first = False  # its first chunk was delivered

    def note(self, chunk: Chunk) -> None:
        """The chunk was delivered."""
        self.has_first = True
        self.ids += chunk.ids
        self.num_chars += len(chunk.text)

    def resumed(self, rid: int) -> Submit:
        """The submission for the rest of it."""
        submit = self.submit
        if not self.has_first:
            return replace(submit, rid=rid, attempt=submit.attempt + 1)
        return replace(
            submit,
            rid=rid,
            sampling=replace(submit.sampling, prompt_logprobs=None),
            text=replace(submit.text, prompt=False, prompt_end=False),
            resume_ids=bytes(self.ids),
            resume_chars=self.num_chars,
            attempt=submit.attempt + 1,
        )


def entries(submits: Sequence[Submit]) -> list[Entry]:
    """An entry for each sequence, in order."""
    return [Entry(one) for submit in submits for one in _split(submit)]


def _split(submit: Submit) -> Iterator[Submit]:
    if submit.n == 1:
        yield submit
        return
    for choice in range(submit.n):  # the core gives each choice the same seed as here
        sampling = replace(submit.sampling, seed=(submit.sampling.seed + choice) % 2**63)
        yield replace(submit, n=1, sampling=sampling)


def fingerprint(submits: Sequence[Submit]) -> bytes:
    """Equal for requests that ask for the same; rids, seeds and resumed output do not count."""
    same = [replace(o, rid=0, sampling=replace(o.sampling, seed=0), resume_ids=b"", attempt=0) for o in submits]
    return sha256(msgspec.msgpack.encode(same)).digest()
