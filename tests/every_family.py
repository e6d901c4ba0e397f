"""Prompts for every family, and what transformers says about tokens. As a program: one of several ranks that serve tiny
checkpoints one after the other."""

import json
import random
from pathlib import Path
from typing import Any

import torch
from checkpoints import VOCAB_SIZE
from rank_processes import this_part
from runner_driver import Driver, Request, engine_config

from pagewire.engine.checkpoint.spec import read_spec
from pagewire.engine.device.base import choose_device
from pagewire.engine.parallel.collectives import join
from pagewire.engine.runner.loading import load_model
from pagewire.engine.runner.runner import Runner

MAX_LEN = 640
MAX_TOKENS = 40
NUM_PAGES = 1600  # enough for the models that have many pages a block


def make_prompts(folder: Path, num: int) -> list[list[int]]:
    """Prompts of 1 to 600 tokens, or as many as the model takes. A fourth of them share a prefix with another."""
    rng = random.Random(folder.name)
    longest = min(600, read_spec(folder).max_position - MAX_TOKENS)
    lengths = [1, 2, 15, 16, 17, 31, 32, 33, longest] + [rng.randint(1, 120) for _ in range(num * 3 // 4 - 9)]
    lengths += [rng.randint(121, longest) for _ in range(num - len(lengths))]
    prompts = [[rng.randrange(3, VOCAB_SIZE) for _ in range(n)] for n in lengths]
    for i in range(0, num, 4):
        other = prompts[rng.randrange(num)]
        prompts[i] = (other[: rng.randint(0, len(other))] + prompts[i])[: max(1, lengths[i])]
    return prompts


def greedy_of(model: Any, prompt: list[int], output: list[int]) -> list[int]:
    """The greedy token of transformers' model at each position of the output. They equal the output if and only if it
    is what `generate` gives: the first that differs is computed from the same tokens."""
    ids, tokens = prompt + output[:-1], list[int]()
    # Longrope has other factors at all positions of longer sequences.
    limit = getattr(model.config, "original_max_position_embeddings", len(ids))
    for num in sorted({min(limit, len(ids)), len(ids)}):
        first = len(prompt) + len(tokens)
        if first <= num:
            with torch.inference_mode():
                logits = model(torch.tensor([ids[:num]]), use_cache=False).logits[0, first - 1 :]
            tokens += [int(token) for token in logits.argmax(-1)]
    return tokens


def _serve() -> None:
    """Serves the checkpoints of jobs.json, and writes the outputs."""
    torch.set_num_threads(1)
    part = this_part()
    jobs: dict[str, list[list[int]]] = json.loads((part.folder / "jobs.json").read_text())
    group, outputs = None, {}
    for path, prompts in jobs.items():
        config = engine_config(Path(path), tensor_parallel_size=part.size, kv_cache_memory="8M")
        device = choose_device(config, rank_info=part.info)
        group = group or join(part.info, part.size, device.torch_device, level=config.cpu_level)
        with torch.inference_mode():
            model = load_model(config, read_spec(Path(path)), device, device.queue(), group, None)
        runner = Runner(config=config, model=model, device=device, group=group, timings={}, shared=None)
        runner.open_cache(NUM_PAGES)
        requests = [Request(prompt, max_new=MAX_TOKENS // 4) for prompt in prompts]
        Driver(runner, NUM_PAGES).run(requests, chunk=64, budget=100)
        outputs[path] = [request.output for request in requests]
    (part.folder / f"outputs-{part.info.rank}.json").write_text(json.dumps(outputs))


if __name__ == "__main__":
    _serve()
