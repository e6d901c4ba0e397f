"""Healthy requests served together with requests whose logits are not finite, in every kind of row."""

import shutil
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any

import checkpoints
from engine_loop import Loop
from fakes import enqueue
from msgspec.structs import replace
from safetensors.torch import load_file, save_file

from pagewire.ipc.messages import Constraint, Enqueue, Failed, Pooling, Sampling

POISON = 7  # a token whose embedding is NaN


def poisoned(folder: Path, target: Path) -> Path:
    """A copy of the checkpoint in which one token makes logits not finite."""
    shutil.copytree(folder, target)
    tensors = load_file(target / "model.safetensors")
    tensors["model.embed_tokens.weight"][POISON] = float("nan")
    save_file(tensors, target / "model.safetensors")
    return target


def _prompt(first: int, length: int) -> list[int]:
    return [POISON + 1 + (first + i * i) % (checkpoints.VOCAB_SIZE - POISON - 1) for i in range(length)]


def good(num_tokens: int) -> list[Enqueue]:
    """Healthy requests; two of them share a prefix with bad ones."""
    again = Sampling(temperature=0, logit_bias={40: 1e4})  # always the same token, so it becomes a draft token
    plain: dict[str, Any] = {"max_tokens": num_tokens, "ignore_eos": True}
    return [
        enqueue(0, _prompt(1, 18), seed=1, **plain),
        replace(enqueue(1, [41, 42, 40, 40, 40, 40, 40], **plain), sampling=again),
        replace(enqueue(2, _prompt(3, 5), **plain), sampling=Sampling(temperature=0, logprobs=2)),
        enqueue(3, _prompt(4, 3), seed=4, constraint=Constraint(), **plain),
    ]


def bad(num_tokens: int) -> list[Enqueue]:
    """POISON after a shared prefix, at the end of a prompt, during decoding, under a grammar, and pooled."""
    plain: dict[str, Any] = {"max_tokens": num_tokens, "ignore_eos": True}
    forced = Sampling(temperature=0, logit_bias={POISON: 1e4})  # samples POISON, which is computed in the next step
    return [
        enqueue(10, [*_prompt(1, 17), POISON, 9, 9], seed=1, **plain),
        enqueue(11, [*_prompt(5, 4), POISON], seed=2, **plain),
        replace(enqueue(12, [40, 41, 42, 43] * 5, **plain), sampling=forced),
        enqueue(13, [*_prompt(4, 3), POISON], seed=3, constraint=Constraint(), **plain),
        replace(enqueue(14, _prompt(6, 3), constraint=Constraint(), **plain), sampling=forced),
        enqueue(15, [*_prompt(7, 9), POISON, 3], pooling=Pooling("mean")),
    ]


def check(loop: Loop, num_tokens: int, most: int = 6) -> None:
    """Checks that only the bad requests fail, that their blocks are not cached, and that the others get the same tokens
    as without them. `most`: number of requests of each kind."""
    healthy, sick = good(num_tokens)[:most], bad(num_tokens)[:most]
    alone = loop.serve(healthy)
    assert all(isinstance(output, list) and len(output) == num_tokens for output in alone.values())
    loop.scheduler.pool.forget_all()
    for _ in range(2):  # without and with cached blocks
        pairs = zip_longest(sick, healthy)
        together = loop.serve([request for request in chain(*pairs) if request is not None])
        failed = {request.rid: together.pop(request.rid) for request in sick}
        for rid, failure in failed.items():
            assert isinstance(failure, Failed) and failure.kind == "internal", (rid, failure)
            assert "not finite" in failure.detail, rid
        assert together == alone
