"""How many requests get other tokens in a batch than alone, for each set of flags that changes the arithmetic.

    python -m pagewire.bench.engine.invariance --model '' FOLDER

Seeded requests of several lengths are served one by one and then all at once, with a token budget so small that prompts
are computed in chunks while others decode. docs/same-tokens.md says with which flags the tokens should be the same.
"""

import argparse
import random
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from ...engine.checkpoint.source import locate
from ...engine.checkpoint.spec import read_spec
from ...errors import ConfigError
from ...offline.llm import LLM
from ...offline.sampling_params import SamplingParams
from ..report import Row, machine, print_table, write_json

WAYS: dict[str, Mapping[str, object]] = {
    "default": {},
    "--deterministic": {"deterministic": True},
    "--kv-cache-dtype bfloat16": {"kv_cache_dtype": "bfloat16"},
    "--dtype bfloat16": {"dtype": "bfloat16"},
    "--dtype bfloat16 --deterministic": {"dtype": "bfloat16", "deterministic": True},
    "--quantization int8": {"quantization": "int8"},
    "--quantization int4": {"quantization": "int4"},
    "--cpu-kernels torch": {"cpu_kernels": "torch"},
    "--cpu-kernels torch --dtype bfloat16": {"cpu_kernels": "torch", "dtype": "bfloat16"},
}
_BUDGET = 64  # tokens of a step


def count(model: str, given: argparse.Namespace, flags: Mapping[str, object]) -> dict[str, float]:
    """The number of requests that got other tokens, and seconds. Raises ConfigError if the flags do not work here."""
    folder, _ = locate(model, None)
    rng = random.Random(0)
    vocab_size = read_spec(folder).vocab_size
    prompts = [[rng.randrange(vocab_size // 2, vocab_size) for _ in range(4 + 13 * i % 200)] for i in range(given.num)]
    params = [
        SamplingParams(temperature=0.9 if i % 2 else 0.0, seed=i, max_tokens=given.tokens, ignore_eos=True)
        for i in range(given.num)
    ]
    options = {"kv_cache_memory": "1G", "max_model_len": 256 + given.tokens, "max_num_batched_tokens": _BUDGET}
    llm = LLM(str(folder), enable_prefix_caching=False, **options, **flags)
    try:
        started = time.perf_counter()
        alone = [
            llm.generate([prompt], one, use_tqdm=False)[0].outputs[0].token_ids
            for prompt, one in zip(prompts, params, strict=True)
        ]
        between = time.perf_counter()
        together = [output.outputs[0].token_ids for output in llm.generate(prompts, params, use_tqdm=False)]
        ended = time.perf_counter()
    finally:
        llm.close()
    different = sum(a != b for a, b in zip(alone, together, strict=True))
    return {"different": different, "alone s": between - started, "together s": ended - between}


def main(argv: Sequence[str] | None = None) -> None:
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("--model", nargs="+", default=[""], help="folders (default: the demo model)")
    flags.add_argument("--num", type=int, default=64, help="number of requests (default: %(default)s)")
    flags.add_argument("--tokens", type=int, default=96, help="of each output (default: %(default)s)")
    flags.add_argument(
        "--json", type=Path, default=Path("bench/results/invariance.json"), help="(default: %(default)s)"
    )
    given = flags.parse_args(argv)
    facts, rows = machine(), []
    for model in given.model:
        for way, options in WAYS.items():
            row = Row(f"{locate(model, None)[1]}, {way}")
            try:
                row.add(**count(model, given, options))
            except ConfigError as error:
                print(f"{row.name}: {error}")
                continue
            rows.append(row)
    print(f"{given.num} requests of {given.tokens} tokens, half of them greedy; number with other tokens in a batch")
    print_table(rows)
    write_json(given.json, "tokens in a batch", rows, facts, {"num": given.num, "tokens": given.tokens})


if __name__ == "__main__":
    main()
