"""A worker of a hybrid model, or one of two ranks, dies during streams: the states in its memory are lost, and no token
changes."""

import json
import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import checkpoints
import pytest
import vocabulary
from completions import ask, open_streams
from waiting import until

from pagewire.tools.servers import Server

NUM_TOKENS = 300


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "num_ranks"),
    [("lfm2", 1), pytest.param("qwen3_5", 1, marks=pytest.mark.long), ("qwen3_5", 2)],
)
def test_streams_go_on_after_a_worker_is_killed(
    kind: str, num_ranks: int, start: Callable[..., Server], tmp_path: Path
) -> None:
    folder = checkpoints.make_checkpoint(tmp_path / "model", kind)
    vocabulary.add_tokenizer(folder)
    rng = random.Random(5)
    prompts = [[rng.randrange(3, checkpoints.VOCAB_SIZE) for _ in range(20 + 40 * i)] for i in range(4)]
    expected = checkpoints.reference_greedy(folder, prompts, NUM_TOKENS)
    flags = ("--dtype", "float32", "--max-model-len", "640", "--tensor-parallel-size", str(num_ranks))
    server = start(str(folder), *flags).wait_ready()
    workers = server.of_kind("worker")
    assert len(workers) == num_ranks
    with ThreadPoolExecutor(len(prompts)) as pool:
        streams, outputs = open_streams(pool, server, prompts, NUM_TOKENS)
        workers[-1].kill()
        for stream in streams:
            stream.result()
    assert outputs == expected

    def are_replaced() -> bool:
        after = {worker.pid for worker in server.of_kind("worker")}
        return len(after) == num_ranks and after.isdisjoint(worker.pid for worker in workers)

    until(are_replaced, "every rank is replaced", 60)

    # The state at the end of a turn on the new worker is found by the next turn.
    text = prompts[0] + outputs[0] + [7, 8]
    (again,) = checkpoints.reference_greedy(folder, [text], 8)
    with ask(server, text, max_tokens=8) as response:
        answer = json.load(response)
    assert answer["choices"][0]["token_ids"] == again
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == len(text) - 3
