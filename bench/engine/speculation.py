"""`--speculative ngram` compared with no speculation, in turn, on texts with more and less repetition. The tokens must
be the same.

    python -m pagewire.bench.engine.speculation --requests 1 64
"""

import argparse
import time
from collections.abc import Sequence
from pathlib import Path

from ...engine.checkpoint.source import locate
from ...offline.llm import LLM
from ...offline.sampling_params import SamplingParams
from ..report import Row, machine, print_table, write_json
from ..workload import prompts

_EIGHT = {token: 1000.0 for token in range(50, 58)}
TEXTS = {
    "one token over and over": SamplingParams(temperature=0, logit_bias={50: 1000.0}),
    "what the model says, greedy": SamplingParams(temperature=0),
    "what the model says, sampled": SamplingParams(temperature=1, seed=3),
    # Every n-gram has occurred before, and none predicts the next token.
    "eight tokens at random": SamplingParams(temperature=30, seed=5, logit_bias=_EIGHT),
    "any tokens at random": SamplingParams(temperature=100, seed=3),
}


def main(argv: Sequence[str] | None = None) -> None:
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("--model", default="", help="a folder (default: the demo model)")
    flags.add_argument("--requests", nargs="+", type=int, default=[1, 64], help="at once (default: %(default)s)")
    flags.add_argument("--length", type=int, default=128, help="of each output, in tokens (default: %(default)s)")
    flags.add_argument("--repeat", type=int, default=7, help="(default: %(default)s)")
    flags.add_argument("--threads", type=int, default=0)
    flags.add_argument("--json", type=Path, default=Path("bench/results/speculation.json"))
    given = flags.parse_args(argv)
    facts = machine()
    folder, name = locate(given.model, None)

    def engine(**options: object) -> LLM:
        return LLM(str(folder), threads=given.threads, enable_prefix_caching=False, max_model_len=1024, **options)

    plain, speculating = engine(), engine(speculative="ngram")
    rows = []
    for num in given.requests:
        batch = prompts(folder, num, 128)
        for text, params in TEXTS.items():
            params = SamplingParams(
                **{**vars(params), "max_tokens": given.length, "ignore_eos": True, "detokenize": False}
            )
            row = Row(f"{text}, {num} at once")
            tokens: dict[LLM, list[list[int]]] = {}
            for repetition in range(given.repeat + 1):
                seconds: dict[LLM, float] = {}
                for llm in (plain, speculating) if repetition % 2 else (speculating, plain):
                    started = time.perf_counter()
                    outputs = llm.generate(batch, params, use_tqdm=False)
                    seconds[llm] = time.perf_counter() - started
                    tokens[llm] = [output.outputs[0].token_ids for output in outputs]
                assert tokens[plain] == tokens[speculating], f"{text}: the tokens differ"
                if repetition:  # the first warms up
                    row.add(**{"without, s": seconds[plain], "with, s": seconds[speculating]})
                    row.add(**{"times as fast": seconds[plain] / seconds[speculating]})
            rows.append(row)
    print(f"{name}, prompts of 128 tokens, {given.length} tokens each; the same tokens with and without")
    print_table(rows)
    settings: dict[str, object] = {"model": name, "length": given.length, "repeat": given.repeat}
    write_json(given.json, "n-gram speculation", rows, facts, settings)


if __name__ == "__main__":
    main()
