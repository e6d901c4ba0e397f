"""The requests of the benchmarks: fixed prompts and lengths, the same for every engine."""

import argparse
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

_QUESTIONS = (
    "Count from {a} to {b}",
    "What is {a} + {b}?",
    "Spell the word {w}",
    "Repeat after me: {w} {a} {w}",
    "What day comes after Monday?",
)
_WORDS = ("river", "lemon", "window", "garden", "silver", "pencil")


def conversations(num: int, seed: int = 0) -> list[list[dict[str, str]]]:
    """`num` one-turn conversations that the demo model can answer."""
    rng = random.Random(seed)
    return [
        [
            {
                "role": "user",
                "content": rng.choice(_QUESTIONS).format(
                    a=rng.randint(1, 40), b=rng.randint(41, 80), w=rng.choice(_WORDS)
                ),
            }
        ]
        for _ in range(num)
    ]


def prompts(folder: Path, num: int, num_tokens: int, seed: int = 0) -> list[list[int]]:
    """`num` prompts of exactly `num_tokens` ids each, cut from rendered questions."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    text = iter(conversations(num * (num_tokens // 4 + 2), seed))
    found = []
    for _ in range(num):
        ids: list[int] = []
        while len(ids) < num_tokens:
            ids += tokenizer.encode(next(text)[0]["content"] + "\n", add_special_tokens=False).ids
        found.append(ids[:num_tokens])
    return found


def parser(description: str | None, *, json: str) -> argparse.ArgumentParser:
    """The flags for the requests and repetitions. `json`: default path of the results."""
    flags = argparse.ArgumentParser(description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    flags.add_argument("--model", default="", help="a folder or Hub name; empty: the demo model")
    flags.add_argument("--num-prompts", type=int, default=16, help="number of requests")
    flags.add_argument("--input-len", type=int, default=64, help="prompt tokens of each")
    flags.add_argument("--output-len", type=int, default=64, help="output tokens of each")
    flags.add_argument("--dtype", default="float32", choices=("bfloat16", "float32"), help="of weights and KV")
    flags.add_argument("--threads", type=int, default=1, help="torch threads, for every engine in the table")
    flags.add_argument("--repeat", type=int, default=5, help="repetitions")
    flags.add_argument("--json", type=Path, default=Path(json), help="where to write the results")
    return flags


def settings(arguments: argparse.Namespace, name: str) -> dict[str, object]:
    """The flags, for a results file."""
    given = {key: value for key, value in vars(arguments).items() if not isinstance(value, Path)}
    return given | {"model": name}


class Transformers:
    """transformers' `generate` on the same checkpoint, as the baseline without an engine."""

    def __init__(self, folder: Path, dtype: str) -> None:
        import torch
        import transformers

        self._torch = torch
        kind: Any = transformers.AutoModelForCausalLM
        self._model = kind.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()

    def generate(self, batch: Sequence[Sequence[int]], num_tokens: int) -> None:
        """Generates greedily, exactly `num_tokens` each; all prompts of a batch must have the same length."""
        ids = self._torch.tensor([list(prompt) for prompt in batch])
        with self._torch.inference_mode():
            self._model.generate(
                ids,
                attention_mask=self._torch.ones_like(ids),
                max_new_tokens=num_tokens,
                min_new_tokens=num_tokens,
                do_sample=False,
                pad_token_id=0,
            )
