"""Random models of transformers' classes, and how their log-probabilities compare with ours."""

import dataclasses
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from checkpoints import COMMON, VOCAB_SIZE
from runner_driver import Driver, Request, arrays, engine_config

from pagewire.engine.checkpoint.spec import is_native, read_spec
from pagewire.engine.runner.runner import Runner
from pagewire.ipc.messages import Sampling

LENGTHS = (2, 17, 40, 100)


def make_model(folder: Path, config_class: str, changes: dict[str, Any]) -> Any:
    """Writes a random model; returns transformers' model of it, as read from the file."""
    made: Any = getattr(transformers, config_class)
    names = {field.name for field in dataclasses.fields(made)} | {*made.attribute_map, "initializer_range"}
    common = {name: value for name, value in COMMON.items() if name in names}
    config: Any = made(**{**common, **changes})
    torch.manual_seed(3)
    auto: Any = transformers.AutoModelForCausalLM
    model = auto.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:  # norms and biases are ones and zeros by default, which would hide mistakes
                parameter.add_(torch.randn_like(parameter) * 0.2)
    model.save_pretrained(folder)
    # Falcon's eager attention adds the position biases twice: as part of the mask, and to the scores.
    kind = "sdpa" if changes.get("alibi") else "eager"
    return auto.from_pretrained(folder, dtype=torch.float32, attn_implementation=kind).eval()


def check_log_probabilities(config_class: str, changes: dict[str, Any], kernels: str, tmp_path: Path) -> None:
    """Of prompts, and the first token after each, for a random model that is written to a folder."""
    model = make_model(tmp_path, config_class, changes)
    spec = read_spec(tmp_path)
    assert is_native(spec), f"{json.loads((tmp_path / 'config.json').read_text())}: {spec.why_not_described}"
    rng = random.Random(config_class)
    prompts = [[rng.randrange(3, VOCAB_SIZE) for _ in range(num)] for num in LENGTHS]
    runner = Runner.load(engine_config(tmp_path, cpu_kernels=kernels))
    runner.open_cache(64)
    scoring = Sampling(temperature=0, prompt_logprobs=0)
    requests = [Request(prompt, sampling=scoring, max_new=1) for prompt in prompts]
    Driver(runner, 64).run(requests, chunk=16, budget=50, rows=3, seed=2)
    for request in requests:
        with torch.inference_mode():
            logits = model(torch.tensor([request.prompt])).logits[0]
        expected = logits[:-1].log_softmax(-1).gather(1, torch.tensor(request.prompt[1:])[:, None])[:, 0].numpy()
        _, values = arrays(request.prompt_logprobs)
        assert np.abs(values[:, 0] - expected).max() < 2e-3
        assert request.output == [int(logits[-1].argmax())]
