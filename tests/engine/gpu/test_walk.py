"""Programs of many families in the step of a GPU: the tokens of transformers, with torch's operations between the
kernels, and the same numbers without the rules that fuse operations."""

import random
from typing import Any

import checkpoints
import numpy as np
import pytest
from family_kinds import Kind, make_kind
from runner_driver import Request, arrays
from torch.utils._python_dispatch import TorchDispatchMode

from pagewire.engine.executors.reference import Reference
from pagewire.engine.models.program import Embed
from pagewire.ipc.messages import Sampling

LENGTHS = (1, 17, 29)
SMALL: dict[str, Any] = {"max_num_batched_tokens": 32, "max_num_seqs": 4}  # since the interpreter is slow
WINDOW = {"sliding_window": 24, "num_hidden_layers": 2}
NARROW = {"moe_intermediate_size": 32, "num_hidden_layers": 2}

QUICK = ("Gemma4TextConfig", "GptOssConfig", "GPTNeoXConfig", "DeepseekV3Config")  # together all kinds of operations
# Each with what torch computes.
FAMILIES: list[tuple[Kind, tuple[str, ...]]] = [
    (("Gemma2Config", {**WINDOW, "query_pre_attn_scalar": 16, "attn_logit_softcapping": 5.0}), ("gated activation",)),
    (
        ("Gemma3TextConfig", {**WINDOW, "layer_types": ["sliding_attention", "full_attention"]}),
        ("gated activation",),
    ),
    (
        (
            "Gemma4TextConfig",
            {
                **WINDOW,
                "num_hidden_layers": 3,
                "global_head_dim": 32,
                "num_global_key_value_heads": 1,
                "attention_k_eq_v": True,
                "hidden_size_per_layer_input": 8,
                "vocab_size_per_layer_input": checkpoints.VOCAB_SIZE,
                "num_kv_shared_layers": 1,
                "layer_types": ["full_attention", "sliding_attention", "full_attention"],
            },
        ),
        ("gated activation", "rotary embedding", "RMS norm"),
    ),
    (
        (
            "GptOssConfig",
            {**WINDOW, "num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 32},
        ),
        (),
    ),
    (("CohereConfig", {"num_hidden_layers": 2, "use_qk_norm": True, "logit_scale": 0.5}), ("layer norm",)),
    (("Olmo2Config", {"num_hidden_layers": 2}), ()),
    (("GPTNeoXConfig", {"num_hidden_layers": 2}), ("layer norm", "activation")),
    (("Phi3Config", {"num_hidden_layers": 2, "sliding_window": 24, "partial_rotary_factor": 0.5}), ()),
    (
        (
            "Glm4MoeConfig",
            {
                **NARROW,
                "n_routed_experts": 8,
                "num_experts_per_tok": 3,
                "n_shared_experts": 1,
                "n_group": 4,
                "topk_group": 2,
                "first_k_dense_replace": 1,
                "use_qk_norm": True,
            },
        ),
        (),
    ),
    (
        (
            "DeepseekV3Config",
            {
                **NARROW,
                "n_routed_experts": 8,
                "num_experts_per_tok": 3,
                "n_shared_experts": 1,
                "n_group": 4,
                "topk_group": 2,
                "first_k_dense_replace": 1,
                "kv_lora_rank": 16,
                "q_lora_rank": 24,
                "qk_rope_head_dim": 16,
                "qk_nope_head_dim": 16,
                "v_head_dim": 12,
                "head_dim": 16,
                "num_key_value_heads": 4,
            },
        ),
        ("rotary embedding",),
    ),
]


def prompts_of(seed: str) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(3, checkpoints.VOCAB_SIZE) for _ in range(n)] for n in LENGTHS]


@pytest.mark.parametrize(
    ("kind", "in_torch"),
    [
        pytest.param(kind, names, id=kind[0], marks=() if kind[0] in QUICK else pytest.mark.long)
        for kind, names in FAMILIES
    ],
)
def test_greedy_tokens_are_those_of_transformers(kind, in_torch, tmp_path, driver):
    folder = make_kind(tmp_path, *kind)
    prompts = prompts_of(kind[0])
    expected = checkpoints.reference_greedy(folder, prompts, 4)
    assert len({tuple(output) for output in expected}) == len(expected), "the outputs should differ by prompt"
    served = driver(folder, **SMALL)
    note = served.runner.notes[0]
    assert note.startswith("Triton kernels") and all(name in note for name in in_torch), note
    assert ("torch computes" in note) == bool(in_torch), note
    requests = [Request(prompt, max_new=4) for prompt in prompts]
    served.run(requests, chunk=20, budget=32, rows=3)
    assert [request.output for request in requests] == expected


class _NoWaiting(TorchDispatchMode):
    """Fails where torch would wait for numbers of a device."""

    waiting = ("_local_scalar_dense", "nonzero", "masked_select", "bincount", "equal", "unique_dim", "_unique2")

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert func.overloadpacket.__name__ not in self.waiting, func
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("kind", ["Gemma4TextConfig", "GPTNeoXConfig"])
def test_the_operations_of_torch_wait_for_nothing(kind, tmp_path, driver, monkeypatch):
    """Except embeddings, which round their scale on the host."""
    run, seen = Reference.run, set()

    def watched(reference, op, registers, step):
        if isinstance(op.args, Embed):
            return run(reference, op, registers, step)
        seen.add(type(op.args).__name__)
        with _NoWaiting():
            return run(reference, op, registers, step)

    monkeypatch.setattr(Reference, "run", watched)
    changes = dict(family for family, _ in FAMILIES)[kind]
    served = driver(make_kind(tmp_path, kind, changes), **SMALL)
    served.run([Request(prompts_of(kind)[0], max_new=2)], rows=3)
    assert seen >= ({"Glu", "Rotate", "Normalize"} if kind == "Gemma4TextConfig" else {"Activate", "Normalize"})


def test_fused_operations_give_the_numbers_of_single_ones(checkpoint, driver, monkeypatch):
    """For prompts, and for steps of few tokens, which have rules of their own."""
    folder = checkpoint("qwen3", num_hidden_layers=1)

    def numbers():
        served = driver(folder, **SMALL)
        sampling = Sampling(temperature=0, prompt_logprobs=0, logprobs=0)
        requests = [Request(prompt, max_new=3, sampling=sampling) for prompt in prompts_of("rules")[1:]]
        served.run(requests, chunk=20, budget=32, rows=3)
        parts = [part for request in requests for part in (*request.prompt_logprobs, *request.logprobs)]
        launches = len(served.runner._model.decoder._walk._few.launches)
        return [request.output for request in requests], arrays(parts)[1], launches

    tokens, fused, few = numbers()
    monkeypatch.setattr("pagewire.engine.gpu.rules.RULES", ())
    same_tokens, single, many = numbers()
    assert few == 6 and many == 14, "the rules apply"
    assert tokens == same_tokens
    np.testing.assert_allclose(fused, single, atol=1e-4)
