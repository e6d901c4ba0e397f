"""Families with recurrent layers against transformers' own classes: tiny random models, chunked and batched."""

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import VOCAB_SIZE
from family_models import check_log_probabilities, make_model
from hybrid_kinds import FAMILIES
from runner_driver import Driver, Request, arrays, engine_config

from pagewire.engine.checkpoint.spec import read_spec
from pagewire.engine.models.description import Attention
from pagewire.engine.runner.runner import Runner
from pagewire.ipc.messages import Sampling

_ENDS = {"layer_types": ["linear_attention", "full_attention", "linear_attention"]}
_EVERY_TIME = ("FalconH1Config", "JambaConfig", "Lfm2Config", "Mamba2Config", "OlmoHybridConfig", "Qwen3_5TextConfig")


def variants(kernels: tuple[str, ...]) -> list[Any]:
    """The first variant of some families with C kernels in each run, and the others in long runs."""
    found, seen = [], set()
    for number, (name, changes) in enumerate(FAMILIES):
        for kind in kernels:
            is_quick = kind == "auto" and name in _EVERY_TIME and name not in seen
            marks = () if is_quick else pytest.mark.long
            found.append(
                pytest.param(name, changes, kind, id=f"{name.removesuffix('Config')}-{number}-{kind}", marks=marks)
            )
        seen.add(name)
    return found


@pytest.mark.parametrize(("config_class", "changes", "kernels"), variants(("auto", "torch")))
def test_log_probabilities_equal_those_of_transformers(
    config_class: str, changes: dict[str, Any], kernels: str, tmp_path: Path
) -> None:
    check_log_probabilities(config_class, changes, kernels, tmp_path)


@pytest.mark.parametrize(("config_class", "changes", "kernels"), variants(("auto",)))
def test_bits_do_not_depend_on_how_a_prompt_is_cut(
    config_class: str, changes: dict[str, Any], kernels: str, tmp_path: Path
) -> None:
    if config_class == "KimiLinearConfig":
        pytest.skip("torch computes its latent attention, whose sums depend on the number of queries")
    make_model(tmp_path, config_class, changes)
    rng = random.Random(config_class)
    prompts = [[rng.randrange(3, VOCAB_SIZE) for _ in range(num)] for num in (61, 30)]
    runner = Runner.load(engine_config(tmp_path, cpu_kernels=kernels))
    runner.open_cache(64)
    found = []
    for chunk, budget in ((100, 200), (1, 1), (7, 11), (64, 40)):
        scoring = Sampling(temperature=0, prompt_logprobs=0)
        requests = [Request(prompt, sampling=scoring, max_new=3) for prompt in prompts]
        Driver(runner, 64).run(requests, chunk=chunk, budget=budget, rows=3, seed=chunk)
        found.append([(request.output, arrays(request.prompt_logprobs)[1]) for request in requests])
    for other in found[1:]:
        for (tokens, values), (expected_tokens, expected) in zip(other, found[0], strict=True):
            assert tokens == expected_tokens and np.array_equal(values, expected)


def test_minimax_is_served_with_its_authors_fields(tmp_path: Path) -> None:
    """MiniMax-Text-01 and M1: other names of fields, and the same tensors."""
    factors = {"full_attn_alpha_factor": 1.3, "linear_attn_beta_factor": 0.8, "mlp_alpha_factor": 1.1}
    model = make_model(tmp_path, "MiniMaxConfig", {**_ENDS, **factors, "num_local_experts": 4})
    file = tmp_path / "config.json"
    fields = json.loads(file.read_text())
    ours = {name: fields[name] for name in (*_SAME, "num_local_experts", "num_experts_per_tok", "rms_norm_eps")}
    ours |= {
        "architectures": ["MiniMaxM1ForCausalLM"],
        "model_type": "minimax_m1",
        "attn_type_list": [0, 1, 0],
        "layernorm_full_attention_alpha": 1.3,
        "layernorm_linear_attention_beta": 0.8,
        "layernorm_mlp_alpha": 1.1,
        "postnorm": True,
        "rope_theta": fields["rope_parameters"]["rope_theta"],
        "rotary_dim": 16,
        "shared_intermediate_size": 0,
    }
    file.write_text(json.dumps(ours))
    rng = random.Random(5)
    requests = [Request([rng.randrange(3, VOCAB_SIZE) for _ in range(num)], max_new=8) for num in (2, 40, 100)]
    runner = Runner.load(engine_config(tmp_path))
    runner.open_cache(64)
    Driver(runner, 64).run(requests, chunk=16, budget=50, rows=3, seed=2)
    for request in requests:
        with torch.inference_mode():
            logits = model(torch.tensor([request.prompt + request.output])).logits[0, len(request.prompt) - 1 : -1]
        assert request.output == logits.argmax(-1).tolist()
    file.write_text(json.dumps(ours | {"rotary_dim": 8}))
    spec = read_spec(tmp_path)
    assert spec.decoder is not None
    ropes = {body.rope.dims for body in spec.decoder.bodies if isinstance(body, Attention) and body.rope is not None}
    assert ropes == {8}
    file.write_text(json.dumps(ours | {"postnorm": False}))
    assert "postnorm" in read_spec(tmp_path).why_not_described


_SAME = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "head_dim",
    "num_key_value_heads", "max_position_embeddings", "hidden_act", "tie_word_embeddings", "dtype", "eos_token_id",
)  # fmt: skip
