"""Programs of many families in the step of a GPU: the tokens of transformers, with torch's operations between the
kernels, and the same numbers without the rules that fuse operations."""

import random
from typing import Any

import checkpoints
import numpy as np
import pytest
from family_kinds import LATENT_ON_GPU, Kind, make_kind
from runner_driver import Request, arrays
from torch.utils._python_dispatch import TorchDispatchMode

from pagewire.engine.executors.reference import Reference
from pagewire.engine.gpu.rules import kind_of
from pagewire.engine.models.program import Embed
from pagewire.ipc.messages import Sampling

LENGTHS = (1, 17, 29)
SMALL: dict[str, Any] = {"max_num_batched_tokens": 32, "max_num_seqs": 4}  # since the interpreter is slow
WINDOW = {"sliding_window": 24, "num_hidden_layers": 2}
NARROW = {"moe_intermediate_size": 32, "num_hidden_layers": 2}

# Together most kinds of operations.
QUICK = ("Gemma4TextConfig", "GptOssConfig", "GPTNeoXConfig", "DeepseekV3Config", "MiMoV2FlashConfig")
# Each with what torch computes.
FAMILIES: list[tuple[Kind, tuple[str, ...]]] = [
    (("Gemma2Config", {**WINDOW, "query_pre_attn_scalar": 16, "attn_logit_softcapping": 5.0}), ()),
    (
        ("Gemma3TextConfig", {**WINDOW, "layer_types": ["sliding_attention", "full_attention"]}),
        (),
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
        (),
    ),
    (
        (
            "GptOssConfig",
            {**WINDOW, "num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 32},
        ),
        (),
    ),
    (("CohereConfig", {"num_hidden_layers": 2, "use_qk_norm": True, "logit_scale": 0.5}), ()),
    (("Olmo2Config", {"num_hidden_layers": 2}), ()),
    (("GPTNeoXConfig", {"num_hidden_layers": 2}), ()),
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
                **LATENT_ON_GPU,
            },
        ),
        (),
    ),
    (
        (
            "Gemma3nTextConfig",
            {
                **WINDOW,
                "layer_types": ["full_attention", "sliding_attention"],
                "num_kv_shared_layers": 0,
                "activation_sparsity_pattern": [0.5, 0.0],
                "hidden_size_per_layer_input": 8,
                "vocab_size_per_layer_input": checkpoints.VOCAB_SIZE,
                "laurel_rank": 8,
            },
        ),
        (),
    ),
    (
        (
            "Llama4TextConfig",
            {
                "num_hidden_layers": 2,
                "num_local_experts": 4,
                "num_experts_per_tok": 2,
                "intermediate_size_mlp": 80,
                "attention_chunk_size": 16,
                "no_rope_layer_interval": 2,
                "floor_scale": 8,
            },
        ),
        (),
    ),
    (
        ("FalconConfig", {"num_hidden_layers": 1, "alibi": True, "multi_query": False, "bias": True}),
        (),
    ),
    (("FalconConfig", {"num_hidden_layers": 1, "num_attention_heads": 20, "hidden_size": 160}), ()),  # a group of 20
    (("MptConfig", {"d_model": 96, "n_heads": 4, "n_layers": 1}), ()),
    (
        (
            "MiMoV2FlashConfig",
            {
                **WINDOW,
                "n_routed_experts": 4,
                "num_experts_per_tok": 2,
                "moe_intermediate_size": 32,
                "head_dim": 48,
                "v_head_dim": 32,
                "num_key_value_heads": 1,
            },
        ),
        (),
    ),
    (("ApertusConfig", {"num_hidden_layers": 1}), ()),  # xIELU
    (("NemotronConfig", {"num_hidden_layers": 1, "attention_bias": True, "partial_rotary_factor": 0.25}), ()),  # ReLU²
    (("OPTConfig", {"num_hidden_layers": 1, "ffn_dim": 96, "word_embed_proj_dim": 32}), ()),  # learned positions
    (("GPT2Config", {"n_layer": 1}), ()),
    (("OlmoConfig", {"num_hidden_layers": 1, "clip_qkv": 0.5}), ()),  # norms without weights
    (("HunYuanDenseV1Config", {"num_hidden_layers": 1}), ()),  # norms after the rotation
    (
        (
            "Ministral3Config",
            {
                "num_hidden_layers": 1,
                "rope_parameters": {
                    "rope_type": "yarn",
                    "rope_theta": 1e6,
                    "factor": 16.0,
                    "original_max_position_embeddings": 8,
                    "llama_4_scaling_beta": 0.3,
                    "mscale": 1.0,
                    "mscale_all_dim": 1.0,
                },
            },
        ),
        (),
    ),
    (
        (
            "Qwen2MoeConfig",
            {
                **NARROW,
                "num_experts": 4,
                "num_experts_per_tok": 2,
                "moe_intermediate_size": 40,
                "shared_expert_intermediate_size": 48,
                "head_dim": None,
            },
        ),
        (),
    ),
    (
        (
            "LongcatFlashConfig",
            {
                "num_layers": 1,
                **LATENT_ON_GPU,
                "n_routed_experts": 4,
                "zero_expert_num": 3,
                "moe_topk": 3,
                "expert_ffn_hidden_size": 32,
            },
        ),
        (),
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


def test_torchs_functions_wait_for_nothing(tmp_path, driver, monkeypatch):
    """Those that can replace a kernel. Embeddings round their scale on the host."""
    kind, run, seen = "Gemma3nTextConfig", Reference.run, set()

    def without_kernels(op):
        kind = kind_of(op)
        return "torch" if kind in ("norm", "add", "rotate", "elementwise") else kind

    def watched(reference, op, registers, step):
        if isinstance(op.args, Embed):
            return run(reference, op, registers, step)
        seen.add(type(op.args).__name__)
        with _NoWaiting():
            return run(reference, op, registers, step)

    monkeypatch.setattr(Reference, "run", watched)
    monkeypatch.setattr("pagewire.engine.gpu.rules.kind_of", without_kernels)
    monkeypatch.setattr("pagewire.engine.gpu.rules.RULES", ())
    changes = dict(family for family, _ in FAMILIES)[kind]
    served = driver(make_kind(tmp_path, kind, changes), **SMALL)
    served.run([Request(prompts_of(kind)[0], max_new=2)], rows=3)
    assert seen >= {"Glu", "Rotate", "Normalize", "Activate", "Add", "Scale", "MatchMagnitude", "MixStreams"}


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
