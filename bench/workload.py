"""The requests that the benchmarks send: fixed prompts, fixed lengths, the same for everyone."""

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


class Transformers:
    """transformers' `generate` on the same checkpoint: what one would use without an engine."""

    def __init__(self, folder: Path, dtype: str) -> None:
        import torch
        import transformers

        self._torch = torch
        kind: Any = transformers.AutoModelForCausalLM
        self._model = kind.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()

    def generate(self, batch: Sequence[Sequence[int]], num_tokens: int) -> None:
        """Greedy, exactly `num_tokens` each; all prompts of a batch have one length."""
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
