"""Steps that run out of device memory before or after their kernels, sleep and wake, and rows whose numbers are not
finite."""

import random
from typing import Any

import checkpoints
import not_finite
import pytest
import torch
from engine_loop import Loop
from fakes import enqueue

from pagewire.engine.device.queue import EagerQueue
from pagewire.engine.device.sleep import storages_of

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the queues need a CPU")
SMALL: dict[str, Any] = {"max_num_batched_tokens": 24, "max_num_seqs": 4}  # since the interpreter is slow


class ShortQueue(EagerQueue):
    """Raises OutOfMemoryError in chosen calls: `send` is the first call of a step, `fetch` the last."""

    def __init__(self, *, sends: set[int] = frozenset(), fetches: set[int] = frozenset()) -> None:
        super().__init__(torch.device("cpu"))
        self._sends, self._fetches = sends, fetches
        self.num_sent = self.num_fetched = 0

    def send(self, source, target):
        self.num_sent += 1
        if self.num_sent in self._sends:
            raise torch.OutOfMemoryError
        super().send(source, target)

    def fetch(self, pairs):
        self.num_fetched += 1
        if self.num_fetched in self._fetches:
            raise torch.OutOfMemoryError
        return super().fetch(pairs)


def requests():
    """Two sampled requests, one with a prompt that takes several chunks."""
    rng = random.Random(3)
    prompts = [[rng.randrange(3, checkpoints.VOCAB_SIZE) for _ in range(length)] for length in (3, 30)]
    return [enqueue(rid, prompt, max_tokens=4, seed=rid, ignore_eos=True) for rid, prompt in enumerate(prompts)]


@pytest.mark.long
def test_out_of_memory_steps_and_sleep_change_no_token(checkpoint):
    folder = checkpoint("qwen3", num_hidden_layers=1, tie_word_embeddings=False)
    loop = Loop(folder, queue=EagerQueue(torch.device("cpu")), **SMALL)
    expected = loop.serve(requests())
    assert len({tuple(ids) for ids in expected.values()}) == 2
    loop.scheduler.pool.forget_all()
    loop.sleeps, loop.sleep = [loop.scheduler.step + 3], lambda: _sleep(loop.runner)
    assert loop.serve(requests()) == expected
    assert loop.scheduler.counters.num_out_of_memory == 0

    loop = Loop(folder, queue=ShortQueue(sends={2, 6}, fetches={3, 7}), **SMALL)
    assert loop.serve(requests()) == expected
    assert loop.scheduler.counters.num_out_of_memory == 4


def _sleep(runner) -> None:
    """Sleep and wake; in between, weights and recorded graphs are freed and other memory is allocated."""
    decoder, steps = runner._model.decoder, runner._steps
    while runner.use_idle():
        pass
    assert steps.num_recorded > 0
    held = storages_of(decoder, decoder.device, runner._cache.storage)
    assert sum(storage.nbytes() for storage in held) >= decoder.weights
    assert runner.sleep() > decoder.weights, "the KV cache is freed as well as the weights"
    assert steps.num_recorded == 0
    assert not any(storage.nbytes() for storage in held)
    torch.rand(decoder.weights)
    assert runner.wake()


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:All-NaN")
def test_rows_that_are_not_finite_fail_alone(checkpoint, tmp_path):
    folder = not_finite.poisoned(checkpoint("qwen3", num_hidden_layers=1, tie_word_embeddings=False), tmp_path / "m")
    not_finite.check(Loop(folder, queue=EagerQueue(torch.device("cpu")), **SMALL), 2, most=3)
