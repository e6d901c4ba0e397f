"""How fast the C program decodes each described family, beside a Llama that has as many parameters.

`python -m pagewire.bench.engine.families` makes random checkpoints of about equal size, one of each family and a Llama
whose feed-forward width is chosen so that both read the same number of parameters a token, and decodes with both in
turns. `tools/models.py` puts the figures into docs/models.md.
"""

import argparse
import dataclasses
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
from ...engine.models.families import pages
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
_LLAMA = "LlamaForCausalLM"
_STEP = 32  # of a feed-forward width


def tiny(architecture: str, **changes: Any) -> Any:
    """transformers' config of a small model."""
    kind = next(kind for kind, name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items() if name == architecture)
    made: Any = transformers.CONFIG_MAPPING[kind]
    names = {field.name for field in dataclasses.fields(made)} | {*made.attribute_map, *_SIZES}
    return made(**{name: value for name, value in {**_SIZES, **changes}.items() if name in names})


def make(folder: Path, config: Any) -> int:
    """Writes a random checkpoint. Returns about how many parameters of layers a token reads."""
    auto: Any = transformers.AutoModelForCausalLM
    model = auto.from_config(config, dtype=torch.float32)
    model.save_pretrained(folder)
    read = 0.0
    experts = next((getattr(config, name) for name in _SIZES if "experts" in name and hasattr(config, name)), None)
    for name, parameter in model.base_model.named_parameters():
        is_expert = ".experts" in name and experts
        share = config.num_experts_per_tok / experts if is_expert else 1.0
        read += 0 if "embed" in name else share * parameter.numel()
    return int(read)


def width_of_equal_llama(num: int) -> int:
    """The feed-forward width of a Llama of whose layers a token reads about `num` parameters."""
    h, layers = _SIZES["hidden_size"], _SIZES["num_hidden_layers"]
    attention = 2 * h * _SIZES["head_dim"] * (_SIZES["num_attention_heads"] + _SIZES["num_key_value_heads"])
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
    row = Row(architecture)
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as llama:
        num = make(Path(folder), tiny(architecture))
        make(Path(llama), tiny(_LLAMA, intermediate_size=width_of_equal_llama(num)))
        both = [
            Decoding(Path(each), threads=threads, context=context, num_steps=steps * (repeat + 1))
            for each in (folder, llama)
        ]
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
