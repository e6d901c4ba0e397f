"""A device that has no memory for some steps, before and after their kernels have run; and one that sleeps."""

import random

import checkpoints
import pytest
import torch
from fakes import all_tokens, enqueue
from runner_driver import engine_config

from pagewire.engine.core.trace import make_scheduler
from pagewire.engine.gpu.queue import EagerQueue
from pagewire.engine.runner.runner import Runner
from pagewire.ipc.messages import TokenBatch, bytes_to_ids

NUM_BLOCKS = 64


class ShortQueue(EagerQueue):
    """Has no memory for chosen calls: sending is the first that a step does, fetching the last."""

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


def serve(folder, queue, *, naps: tuple[int, ...] = (), **flags) -> tuple[dict[int, list[int]], int]:
    """(tokens, faults) of sampled requests with prompts in pieces, two steps in flight. naps: after which steps."""
    config = engine_config(folder, max_num_batched_tokens=24, max_num_seqs=4, pipeline_depth=2, **flags)
    runner = Runner.load(config, queue=queue)
    runner.open_cache(NUM_BLOCKS)
    scheduler = make_scheduler(config, NUM_BLOCKS)
    rng = random.Random(3)
    for rid, length in enumerate((3, 30)):
        prompt = [rng.randrange(3, checkpoints.VOCAB_SIZE) for _ in range(length)]
        scheduler.add(enqueue(rid, prompt, max_tokens=4, seed=rid, ignore_eos=True))
    output: dict[int, list[int]] = {}
    while True:
        while (plan := scheduler.plan()) is not None:
            runner.launch(plan)
            scheduler.is_paused = scheduler.step in naps
        if scheduler.is_paused and not runner.num_pending:
            scheduler.empty()
            _sleep(runner)
            scheduler.is_paused = False
            continue
        if not runner.num_pending:
            break
        assert runner.is_done()
        scheduler.apply(runner.collect())
        for item in scheduler.take_news():
            for tokens in all_tokens(item) if isinstance(item, TokenBatch) else ():
                output.setdefault(tokens.rid, []).extend(bytes_to_ids(tokens.ids))
    assert scheduler.pool.num_free == NUM_BLOCKS
    return output, scheduler.counters.num_out_of_memory


def _sleep(runner) -> None:
    """Weights and recordings go, and come back; other memory is taken meanwhile."""
    decoder, steps = runner._model.decoder, runner._steps
    while runner.use_idle():
        pass
    assert steps.num_recorded > 0
    assert runner.sleep() > decoder.weights, "more than the weights: the KV cache, too"
    assert steps.num_recorded == 0
    assert all(not parameter.untyped_storage().nbytes() for parameter in decoder._decoder.parameters())
    torch.rand(decoder.weights)
    assert runner.wake()


@pytest.mark.skipif(torch.cuda.is_available(), reason="the queue is a CPU's")
def test_steps_without_memory_change_no_token(checkpoint):
    folder = checkpoint("qwen3", num_hidden_layers=1)
    expected, num_faults = serve(folder, EagerQueue(torch.device("cpu")))
    assert num_faults == 0 and len({tuple(ids) for ids in expected.values()}) == 2
    queue = ShortQueue(sends={2, 6}, fetches={3, 7})
    assert serve(folder, queue) == (expected, 4)
    assert serve(folder, EagerQueue(torch.device("cpu")), naps=(3,)) == (expected, 0)
