"""Compares the whole worker with transformers: the same greedy tokens in float32, and log-probabilities in bfloat16
that are as close to float32's as transformers' own. Uses the tests' checkpoints and one with a real model's widths."""

import importlib
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from ...engine.runner.runner import Runner
from ...ipc.messages import Sampling
from .figures import Figure
from .setting import ROOT, Setting

_LENGTHS = (1, 15, 16, 17, 45, 130, 300)
_WIDE = {"hidden_size": 1024, "intermediate_size": 3072, "num_attention_heads": 16, "num_key_value_heads": 8}
_STACKED = "gpt_oss"  # whose experts are one tensor: a part of each expert's matrix is loaded at a time
_NUM_PAGES = 400
_MAX_ERROR = 1.25  # of transformers' own


def measure(setting: Setting) -> Iterator[Figure]:
    sys.path.insert(0, str(ROOT / "tests"))
    checkpoints: Any = importlib.import_module("checkpoints")
    driving: Any = importlib.import_module("runner_driver")
    families: Any = importlib.import_module("families")
    rng = np.random.default_rng(0)
    lengths, num_new = setting.choose((_LENGTHS, 16), (_LENGTHS[:3], 2))

    def prompt(length: int) -> list[int]:
        return [int(token) for token in rng.integers(3, checkpoints.VOCAB_SIZE, length)]

    def serve(folder: Any, requests: list[Any], **flags: object) -> None:
        config = driving.engine_config(folder, max_num_batched_tokens=setting.choose(128, 32), max_num_seqs=4, **flags)
        runner = Runner.load(config, queue=setting.open_queue() if setting.smoke else None)
        runner.open_cache(_NUM_PAGES)
        driving.Driver(runner, _NUM_PAGES).run(
            requests, chunk=setting.choose(50, 20), budget=config.max_num_batched_tokens, rows=4
        )

    kinds = setting.choose(("llama", "qwen2-sliding", "qwen3"), ("qwen3",))
    layers = {"num_hidden_layers": setting.choose(3, 1)}
    for kind in (*kinds, _STACKED):
        if kind == _STACKED:
            folder = families.make_family(setting.scratch / kind, kind)
        else:
            folder = checkpoints.make_checkpoint(setting.scratch / kind, kind, **layers)
        prompts = [prompt(length) for length in lengths]
        expected = checkpoints.reference_greedy(folder, prompts, num_new)
        requests = [driving.Request(prompt, max_new=num_new) for prompt in prompts]
        serve(folder, requests)
        wrong = sum(request.output != output for request, output in zip(requests, expected, strict=True))
        name = f"{kind}, float32: requests of {len(prompts)} with other tokens than transformers"
        yield Figure(name=name, value=wrong, unit="", most=0, is_proof=True)

    wide = {**layers, **setting.choose(_WIDE | {"head_dim": 128}, {})}
    for kind in kinds[-1:]:
        deviation = {"initializer_range": setting.choose(0.02, 0.1)}
        folder = setting.scratch / f"{kind}-bf16"
        checkpoints.make_checkpoint(folder, kind, dtype=torch.bfloat16, **wide, **deviation)
        ids = prompt(setting.choose(300, 30))
        request = driving.Request(ids, max_new=1, sampling=Sampling(temperature=0, prompt_logprobs=0))
        serve(folder, [request], dtype="bfloat16")
        ours = driving.arrays(request.prompt_logprobs)[1][:, 0]
        exact, theirs = (_logprobs(checkpoints, folder, ids, dtype) for dtype in (torch.float32, torch.bfloat16))
        error, their_error = np.abs(ours - exact).mean(), np.abs(theirs - exact).mean()
        name = f"{kind}, bfloat16: mean error of log-probabilities, of transformers' own"
        yield Figure(name=name, value=float(error / their_error), unit="×", most=_MAX_ERROR, is_proof=True)


def _logprobs(checkpoints: Any, folder: Any, ids: list[int], dtype: torch.dtype) -> Any:
    """Log-probabilities of the prompt's ids except the first, by transformers on the CPU."""
    with torch.inference_mode():
        logits = checkpoints.load_reference(folder, dtype)(torch.tensor([ids])).logits[0, :-1].float()
    return logits.log_softmax(-1).gather(1, torch.tensor(ids[1:])[:, None])[:, 0].numpy()
