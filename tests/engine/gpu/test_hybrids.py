"""Models with recurrent layers in the step of a GPU: the tokens of transformers, in any chunks, and whatever is found
in the prefix cache, preempted or drafted."""

import random
from pathlib import Path
from typing import Any

import checkpoints
import pytest
import torch
from engine_loop import Loop
from fakes import enqueue
from msgspec import structs
from runner_driver import Request

from pagewire.engine.core.cost import CAUTIOUS, CostModel
from pagewire.engine.device.queue import EagerQueue
from pagewire.ipc.messages import Enqueue, Sampling

SMALL: dict[str, Any] = {"max_num_batched_tokens": 32, "max_num_seqs": 4}  # since the interpreter is slow
QUEUE = None if torch.cuda.is_available() else EagerQueue(torch.device("cpu"))
KINDS: dict[str, dict[str, Any]] = {
    "qwen3_5": {
        "num_hidden_layers": 2,
        "layer_types": ["linear_attention", "full_attention"],
        "linear_num_value_heads": 2,
        "linear_num_key_heads": 1,
    },
    "bamba": {"num_hidden_layers": 2, "mamba_n_heads": 4, "mamba_d_head": 32},
}
OTHERS: dict[str, dict[str, Any]] = {
    "jamba": {"num_hidden_layers": 2, "mamba_d_state": 5, "num_experts": 2, "hidden_size": 64},
    "minimax": {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]},
    "mamba2": {"num_hidden_layers": 1},
    "lfm2": {"num_hidden_layers": 2, "layer_types": ["conv", "full_attention"]},
}


@pytest.fixture(params=KINDS)
def folder(request: pytest.FixtureRequest, checkpoint: Any) -> Path:
    made: Path = checkpoint(request.param, **KINDS[request.param])
    return made


def prompts_of(seed: int, *lengths: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(3, checkpoints.VOCAB_SIZE) for _ in range(length)] for length in lengths]


def greedy(rid: int, prompt: list[int], max_tokens: int, **changes: Any) -> Enqueue:
    asked = enqueue(rid, prompt, max_tokens=max_tokens, ignore_eos=True)
    return structs.replace(asked, sampling=Sampling(temperature=0, **changes))


@pytest.mark.parametrize("kind", [*KINDS, *(pytest.param(kind, marks=pytest.mark.long) for kind in OTHERS)])
def test_greedy_tokens_are_those_of_transformers(kind: str, checkpoint: Any, driver: Any) -> None:
    """Prompts in chunks beside decode rows, and rows that several requests use one after another."""
    folder = checkpoint(kind, **(KINDS | OTHERS)[kind])
    prompts = prompts_of(1, 1, 17, 39, 20)
    expected = checkpoints.reference_greedy(folder, prompts, 4)
    assert len({tuple(output) for output in expected}) == len(expected), "the outputs should differ by prompt"
    served = driver(folder, **SMALL)
    assert served.state_pages > 0 and served.runner.notes[0].startswith("Triton kernels"), served.runner.notes
    requests = [Request(prompt, max_new=4) for prompt in prompts]
    served.run(requests, chunk=20, budget=32, rows=3)
    assert [request.output for request in requests] == expected


def test_the_next_turn_begins_with_the_state_at_the_end_of_the_last(folder: Path) -> None:
    (first,), (new,) = prompts_of(2, 21), prompts_of(3, 6)
    loop = Loop(folder, queue=QUEUE, **SMALL)
    ((_, output),) = loop.serve([greedy(0, first, 4)]).items()
    assert isinstance(output, list)
    second = [*first, *output, *new]
    before = loop.scheduler.counters.num_cached_tokens
    found = loop.serve([greedy(1, second, 4)])[1]
    assert loop.scheduler.counters.num_cached_tokens - before == len(first) + len(output) - 1
    assert [output, found] == checkpoints.reference_greedy(folder, [first, second], 4)


def test_requests_go_on_after_they_were_preempted(folder: Path) -> None:
    """With pages for three requests that begin, and not for three that end."""
    whole = Loop(folder, queue=QUEUE, **SMALL)
    size = whole.runner._config.block_size
    prompts = prompts_of(4, size - 3, size - 2, size - 4)
    num_pages = 3 * (whole.scheduler.pool.groups.state_pages + 1) + 2
    flags = SMALL | {"max_num_batched_tokens": 4 * size}  # all begin in one step
    loop = Loop(folder, queue=QUEUE, num_pages=num_pages, **flags)
    found = loop.serve([greedy(rid, prompt, 8) for rid, prompt in enumerate(prompts)])
    assert loop.scheduler.counters.num_preemptions > 0
    assert [found[rid] for rid in range(3)] == checkpoints.reference_greedy(folder, prompts, 8)


def test_tokens_with_draft_tokens_are_the_same(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CostModel, "break_even", lambda self, work: CAUTIOUS)  # whatever the interpreter costs
    few = {token: 100.0 for token in (40, 41)}
    prompts = [[40 + i % 2 for i in range(11)], [41, 41, 40] * 5]

    def serve(**flags: Any) -> tuple[dict[int, Any], int]:
        loop = Loop(folder, queue=QUEUE, **SMALL, **flags)
        found = loop.serve([greedy(rid, prompt, 24, logit_bias=few) for rid, prompt in enumerate(prompts)])
        return found, loop.scheduler.counters.num_accepted_tokens

    expected, none = serve()
    found, accepted = serve(speculative="ngram,tokens=3")
    assert found == expected and accepted > none == 0
