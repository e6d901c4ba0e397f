"""Accuracy and speed of cheaper arithmetic: `--quantization int8` and `int4`, a bfloat16 KV cache, and quantized
checkpoints beside the same weights as floats.

    python -m pagewire.bench.engine.accuracy --model '' build/peers/qwen3-0.6b

The model generates texts at temperature 1 in float32; a quantized checkpoint does so widened, by torch's kernels. Each
variant then computes the log-probabilities of their tokens. The table has the perplexity, the mean distance of the
log-probabilities to float32's, and how often the most likely token is the same. With random weights probabilities are
nearly equal, so only the distance is meaningful.
"""

import argparse
import math
import time
from collections.abc import Sequence
from pathlib import Path

from ...engine.checkpoint.source import locate
from ...engine.checkpoint.spec import read_spec
from ...offline.llm import LLM
from ...offline.sampling_params import SamplingParams
from ..report import Row, machine, print_table, write_json

WAYS: dict[str, dict[str, str]] = {
    "float32": {},
    "bfloat16 KV": {"kv_cache_dtype": "bfloat16"},
    "int8": {"quantization": "int8"},
    "int8, bfloat16 KV": {"quantization": "int8", "kv_cache_dtype": "bfloat16"},
    "int4": {"quantization": "int4"},
}
STORED: dict[str, dict[str, str]] = {  # of a quantized checkpoint; the first one is the reference here too
    "widened to float32": {"cpu_kernels": "torch"},
    "as stored": {},
}


def read(llm: LLM, texts: Sequence[Sequence[int]]) -> list[tuple[float, int]]:
    """(log-probability, most likely token) for each token of the texts except the first of each."""
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1)
    found = []
    for text, output in zip(texts, llm.generate(list(texts), params, use_tqdm=False), strict=True):
        assert output.prompt_logprobs is not None
        for token, entry in zip(text[1:], output.prompt_logprobs[1:], strict=True):
            assert entry is not None
            found.append((entry[token].logprob, max(entry, key=lambda candidate: entry[candidate].logprob)))
    return found


def compare(model: str, given: argparse.Namespace) -> list[Row]:
    """A row for each variant of one model."""
    folder, name = locate(model, None)
    spec = read_spec(folder)
    vocab_size, ways = spec.vocab_size, WAYS if spec.scheme is None else STORED
    options = {"dtype": "float32", "kv_cache_memory": "2G", "max_model_len": given.length + 64}
    starts = [[300 % vocab_size + i] for i in range(given.num_texts)]
    llm = LLM(str(folder), **options, **next(iter(ways.values())))
    params = [
        SamplingParams(temperature=1, seed=i, max_tokens=given.length, ignore_eos=True) for i in range(len(starts))
    ]
    texts = [
        [*start, *llm.generate([start], one, use_tqdm=False)[0].outputs[0].token_ids]
        for start, one in zip(starts, params, strict=True)
    ]
    llm.close()
    exact: list[tuple[float, int]] = []
    rows = []
    for way, flags in ways.items():
        llm = LLM(str(folder), **options, enable_prefix_caching=False, **flags)
        row = Row(f"{name}, {way}")
        for _ in range(given.repeat):
            started = time.perf_counter()
            found = read(llm, texts)
            row.add(**{"reading, tok/s": len(found) / (time.perf_counter() - started)})
            params_one = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)
            started = time.perf_counter()
            llm.generate([texts[0]], params_one, use_tqdm=False)
            row.add(**{"writing, ms/token": (time.perf_counter() - started) / 64 * 1e3})
        llm.close()
        exact = exact or found
        row.add(perplexity=math.exp(-sum(logprob for logprob, _ in found) / len(found)))
        row.add(
            **{"mean |Δ logprob|": sum(abs(a - b) for (a, _), (b, _) in zip(found, exact, strict=True)) / len(found)}
        )
        row.add(
            **{
                "same best token, %": 100
                * sum(a == b for (_, a), (_, b) in zip(found, exact, strict=True))
                / len(found)
            }
        )
        rows.append(row)
    return rows


def main(argv: Sequence[str] | None = None) -> None:
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("--model", nargs="+", default=[""], help="folders (default: the demo model)")
    flags.add_argument("--num-texts", type=int, default=16, help="(default: %(default)s)")
    flags.add_argument("--length", type=int, default=192, help="of a text, in tokens (default: %(default)s)")
    flags.add_argument("--repeat", type=int, default=3, help="of the timings (default: %(default)s)")
    flags.add_argument("--json", type=Path, default=Path("bench/results/accuracy.json"), help="(default: %(default)s)")
    given = flags.parse_args(argv)
    facts = machine()
    rows = [row for model in given.model for row in compare(model, given)]
    print(f"{given.num_texts} texts of {given.length} tokens")
    print_table(rows)
    settings: dict[str, object] = {"num_texts": given.num_texts, "length": given.length, "repeat": given.repeat}
    write_json(given.json, "accuracy of cheaper arithmetic", rows, facts, settings)


if __name__ == "__main__":
    main()
