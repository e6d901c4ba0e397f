"""The requests: four workloads with fixed seeds and lengths, as token ids."""

import random
from collections.abc import Callable
from dataclasses import dataclass

from .base import Request

_FIRST_WORD = 300  # ids below are special tokens and bytes, which may not have a text of their own


@dataclass(frozen=True)
class Workload:
    """Requests that are sent at once."""

    name: str
    like: str  # a name of `tools.make_checkpoint.SHAPES`
    title: str
    requests: Callable[[random.Random, int], list[Request]]  # (random, size of the vocabulary)
    seed: int

    def make(self, vocab_size: int) -> list[Request]:
        """The requests, the same in each call."""
        return self.requests(random.Random(self.seed), vocab_size)


def _ids(rng: random.Random, num: int, vocab_size: int) -> list[int]:
    return [rng.randrange(_FIRST_WORD, vocab_size) for _ in range(num)]


def plain(streams: int, inputs: tuple[int, int], outputs: tuple[int, int]) -> Callable[..., list[Request]]:
    """inputs, outputs: the smallest and the largest number of tokens."""

    def make(rng: random.Random, vocab_size: int) -> list[Request]:
        lengths = [(rng.randint(*inputs), rng.randint(*outputs)) for _ in range(streams)]
        return [Request(_ids(rng, num_in, vocab_size), num_out) for num_in, num_out in lengths]

    return make


def _shared(streams: int, prefix: int, own: int, output: int) -> Callable[..., list[Request]]:
    def make(rng: random.Random, vocab_size: int) -> list[Request]:
        start = _ids(rng, prefix, vocab_size)
        return [Request(start + _ids(rng, own, vocab_size), output) for _ in range(streams)]

    return make


def workloads(*, quick: bool) -> list[Workload]:
    """W1 to W4. `quick`: on the small checkpoint, with few streams and a quarter of the tokens."""
    big, small = "llama-15m" if quick else "qwen3-0.6b", "llama-15m"
    many, most, part = (4, 8, 4) if quick else (32, 128, 1)
    one, least, double, prefix = 128 // part, 64 // part, 256 // part, 512 // part
    mixed = f"{least}–{double} in, {least}–{one} out"
    ranges = (least, double), (least, one)
    return [
        Workload("W1", big, f"1 stream, {one} in, {one} out", plain(1, (one, one), (one, one)), seed=1),
        Workload("W2", big, f"{many} streams, {mixed}", plain(many, *ranges), seed=2),
        Workload("W3", big, f"{many} × {prefix} shared + 16 in, {least} out", _shared(many, prefix, 16, least), seed=3),
        Workload("W4", small, f"{most} streams, {mixed}", plain(most, *ranges), seed=4),
    ]


def warm_up(streams: int, vocab_size: int) -> list[Request]:
    """Short requests that share no prefix with a workload, so that they leave nothing useful in a prefix cache."""
    return plain(streams, (32, 32), (8, 8))(random.Random(0), vocab_size)
