"""How fast the C program decodes each described family, beside a Llama that moves as many bytes.

`python -m pagewire.bench.engine.families` makes random checkpoints of about equal size, one of each family and a Llama
whose feed-forward width is chosen so that both move as many numbers for a token (weights, states, keys and values), and
decodes with both in turns. `tools/models.py` puts the figures into docs/models.md.
"""

import argparse
import dataclasses
import json
import math
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from ...config.flags import make_config
from ...engine.models.families import describe, pages
from ...engine.models.fields import Fields
from ...engine.models.lower import lower
from ...engine.models.program import Attend, AttendLatent, GatedProduct, Mixture, Product, Program
from ...engine.runner.runner import Runner
from ...errors import PagewireError
from ...ipc.messages import GroupTable, RowOpen, Sampling, StepPlan, ids_to_bytes
from ...procs.prepare import prepare
from ..report import Row, machine, print_table, write_json

_SIZES: dict[str, Any] = {
    "vocab_size": 2048,
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "max_position_embeddings": 1024,
    **{"num_experts": 8, "n_routed_experts": 8, "num_local_experts": 8, "moe_num_experts": 8, "n_shared_experts": 1},
    **{"num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "moe_intermediate_size": 512},
    **{"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0},
}
_MAMBA = {
    **{"mamba_n_heads": 16, "mamba_d_head": 64, "mamba_d_state": 64, "mamba_d_ssm": 1024, "mamba_num_heads": 16},
    **{"mamba_head_dim": 64, "ssm_state_size": 64, "n_mamba_heads": 16, "num_heads": 16, "head_dim": 64},
}
_DELTA = {
    **{"linear_num_key_heads": 4, "linear_num_value_heads": 8, "linear_key_head_dim": 64, "linear_value_head_dim": 64},
    **{"linear_num_heads": 8, "linear_head_dim": 64},
}
_LATENT = {
    **{"q_lora_rank": 128, "kv_lora_rank": 128, "qk_rope_head_dim": 32, "qk_nope_head_dim": 64, "v_head_dim": 64},
    **{"num_key_value_heads": 8, "head_dim": 32},
}
_SHARED = {"shared_expert_intermediate_size": 512, "first_k_dense_replace": 1}
_CHANGES: dict[str, dict[str, Any]] = {
    # By model type: what a family needs besides, so that its layers are about as large as the Llama's.
    **{kind: {**_LATENT, **_SHARED} for kind in ("deepseek_v2", "deepseek_v3", "glm4_moe_lite", "minicpm3", "youtu")},
    "longcat_flash": {
        **_LATENT,
        "num_layers": 3,
        "zero_expert_num": 2,
        "ffn_hidden_size": 1536,
        "expert_ffn_hidden_size": 512,
    },
    "mimo_v2_flash": {**_SHARED, "head_dim": 96, "v_head_dim": 64, "sliding_window": 128},
    **{kind: {**_DELTA, **_SHARED} for kind in ("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next")},
    # transformers 5.23 saves the fused convolution in three equal parts.
    "olmo_hybrid": {**_DELTA, "linear_num_key_heads": 8},
    "kimi_linear": {
        **_DELTA,
        **_LATENT,
        **_SHARED,
        "layer_types": ["linear_attention", "linear_attention", "full_attention"] * 2,
    },
    "bamba": {**_MAMBA, "attn_layer_indices": [2, 5]},
    "granitemoehybrid": {**_MAMBA, "layer_types": ["mamba", "mamba", "attention"] * 2},
    "falcon_h1": _MAMBA,
    "nemotron_h": {**_MAMBA, "n_groups": 2, "layers_block_type": ["mamba", "mlp", "attention", "mlp", "mamba", "mlp"]},
    "mamba2": {**_MAMBA, "state_size": 64},
    "zamba2": {
        "n_mamba_heads": 16,
        "mamba_d_state": 64,
        "head_dim": 128,
        **{"num_key_value_heads": 8, "mamba_ngroups": 1, "num_mem_blocks": 1, "adapter_rank": 32},
        "layers_block_type": ["linear_attention", "linear_attention", "hybrid"] * 2,
    },
    "jamba": {"attn_layer_period": 3, "attn_layer_offset": 1, "mamba_d_state": 16},
    **{kind: {"layer_types": ["conv", "conv", "full_attention"] * 2} for kind in ("lfm2", "lfm2_moe")},
    "llama4_text": {"intermediate_size_mlp": 1536, "attention_chunk_size": 128},
    "gemma3n_text": {
        **{"layer_types": ["sliding_attention", "full_attention"] * 3, "num_kv_shared_layers": 2},
        **{"activation_sparsity_pattern": [0.0] * 6, "hidden_size_per_layer_input": 64, "laurel_rank": 32},
        "vocab_size_per_layer_input": 2048,
    },
    "gemma4_text": {
        **{"layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2, "global_head_dim": 64},
        **{"hidden_size_per_layer_input": 64, "vocab_size_per_layer_input": 2048},
    },
    "mpt": {"d_model": 512, "n_heads": 8, "n_layers": 6},
    "gptj": {"rotary_dim": 32},
    "phimoe": {"sliding_window": 1024},
    "qwen2_moe": _SHARED,
}
_ALWAYS = ("vocab_size", "bos_token_id", "eos_token_id", "pad_token_id")
_LLAMA = "LlamaForCausalLM"
_STEP = 32  # of a feed-forward width


def tiny(architecture: str, **changes: Any) -> Any:
    """transformers' config of a small model."""
    kinds = [kind for kind, name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items() if name == architecture]
    kind = max(kinds, key=lambda kind: kind.endswith("_text"))  # not that of a wrapper
    made: Any = transformers.CONFIG_MAPPING[kind]
    names = {field.name for field in dataclasses.fields(made)} | {
        *made.attribute_map,
        "vocab_size",
        "bos_token_id",
        "eos_token_id",
        "pad_token_id",
    }
    sizes = {**_SIZES, **_CHANGES.get(kind, {}), **changes}
    return made(**{name: value for name, value in sizes.items() if name in names})


def make(folder: Path, config: Any) -> Program:
    """Writes a random checkpoint."""
    auto: Any = transformers.AutoModelForCausalLM
    auto.from_config(config, dtype=torch.float32).save_pretrained(folder)
    raw = json.loads((folder / "config.json").read_text())
    return lower(describe(raw["architectures"][0], Fields(raw, folder / "config.json")))


def moved(program: Program, positions: int) -> int:
    """The numbers that a decode step after so many positions moves between memory and the layers: the weights of
    products and of the experts that are chosen, and the keys and values of each layer, read once, and recurrent states,
    read and written."""
    total = sum(2 * math.prod(state.shape) for state in program.states)
    for op in program.ops:
        if isinstance(op.args, Product | GatedProduct):
            total += op.args.matrix.rows * op.args.matrix.columns
        elif isinstance(op.args, Mixture):
            of_expert = sum(matrix.rows * matrix.columns for matrix in (op.args.gate_up, op.args.down))
            total += op.args.router.top_k * of_expert
        elif isinstance(op.args, AttendLatent):
            total += op.args.heads * (op.args.nope_dim + op.args.value_dim) * op.args.rank
            total += positions * (op.args.rank + op.args.rope_dim)
        elif isinstance(op.args, Attend):
            reach = min(positions, op.args.reach.positions or positions)
            total += reach * op.args.kv_heads * (op.args.head_dim + op.args.value_dim)
    return total


def width_of_equal_llama(num: int, positions: int) -> int:
    """The feed-forward width of a Llama whose layers move about `num` numbers for a token after so many positions."""
    h, layers = _SIZES["hidden_size"], _SIZES["num_hidden_layers"]
    attention = 2 * h * _SIZES["head_dim"] * (_SIZES["num_attention_heads"] + _SIZES["num_key_value_heads"])
    attention += 2 * positions * _SIZES["head_dim"] * _SIZES["num_key_value_heads"]
    width: float = (num / layers - attention) / (3 * h)
    return max(_STEP, round(width / _STEP) * _STEP)


class Decoding:
    """A runner with a row that decodes."""

    def __init__(self, folder: Path, *, threads: int, context: int, num_steps: int) -> None:
        config = prepare(
            make_config(model=str(folder), threads=threads, max_model_len=context + num_steps + 8, dtype="float32")
        )
        self._runner, self._step = Runner.load(config), 0
        max_len = config.max_model_len
        groups = self._runner.groups
        num_blocks = -(-max_len // config.block_size)
        self._runner.open_cache(max(1, sum(group.pages for group in groups)) * num_blocks)
        tables, first, state = [], 0, b""
        for group in groups:
            count = group.pages * (1 if group.kind == "state" else num_blocks)
            ids = ids_to_bytes(list(range(first, first + count)))
            first += count
            if group.kind == "state":
                state = ids
            else:
                tables.append(GroupTable(0, ids))
        prompt = np.random.default_rng(0).integers(3, config.model.vocab_size, context).tolist()
        blocks = b"" if groups else ids_to_bytes(list(range(num_blocks)))
        opened = RowOpen(
            0, ids_to_bytes(prompt), context, 0, blocks, Sampling(temperature=0), tables=tuple(tables), state=state
        )
        self._run(context, (opened,))

    def _run(self, count: int, opens: tuple[RowOpen, ...] = ()) -> None:
        self._runner.launch(StepPlan(self._step, opens, b"", b"", ids_to_bytes([0]), ids_to_bytes([count]), b"\1"))
        self._runner.collect()
        self._step += 1

    def decode(self, num: int) -> float:
        """Milliseconds of a step, the mean of `num`."""
        started = time.perf_counter()
        for _ in range(num):
            self._run(1)
        return (time.perf_counter() - started) / num * 1e3


def measure(architecture: str, *, threads: int, context: int, steps: int, repeat: int) -> Row:
    row, num_steps = Row(architecture), steps * (repeat + 1)
    positions = context + num_steps // 2  # of the step in the middle
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as llama:
        num = moved(make(Path(folder), tiny(architecture)), positions)
        make(Path(llama), tiny(_LLAMA, intermediate_size=width_of_equal_llama(num, positions)))
        both = [Decoding(Path(each), threads=threads, context=context, num_steps=num_steps) for each in (folder, llama)]
        for each in both:
            each.decode(steps)
        for _ in range(repeat):
            family_ms, llama_ms = (each.decode(steps) for each in both)
            row.add(family_ms=family_ms, llama_ms=llama_ms, beside_llama=family_ms / llama_ms)
    return row


def main(argv: Sequence[str] | None = None) -> None:
    known = [  # of wrappers the text part alone, which is another family's
        name for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values() if name in pages() and "Conditional" not in name
    ]
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    flags.add_argument("architectures", nargs="*", help="default: all that are described")
    flags.add_argument("--threads", type=int, default=1)
    flags.add_argument("--context", type=int, default=128, help="positions before the first step")
    flags.add_argument("--steps", type=int, default=20, help="of a repetition")
    flags.add_argument("--repeat", type=int, default=9, help="repetitions, of both models in turn")
    flags.add_argument("--json", type=Path, default=Path("bench/results/families.json"), help="where to write")
    given = flags.parse_args(argv)
    facts, rows = machine(), []
    settings = {"threads": given.threads, "context": given.context, "steps": given.steps}
    for architecture in given.architectures or sorted(set(known)):
        try:
            rows.append(measure(architecture, **settings, repeat=given.repeat))
        except (PagewireError, ValueError, AttributeError, KeyError, TypeError, RuntimeError) as error:
            # Sizes that this family cannot have.
            print(f"{architecture}: not measured: {type(error).__name__}: {error}", flush=True)
            continue
        write_json(given.json, "A decode step of each family beside Llama", rows, facts, settings)  # may be ended early
    print_table(rows)


if __name__ == "__main__":
    main()
