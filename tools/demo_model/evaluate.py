"""Greedy accuracy of the demo model on held-out prompts, per kind.

transformers is the reference that generates. An answer counts when its text is
exactly the expected one and the model stopped by itself. Long chats are a kind of
their own: a held-out question after some thousand tokens of other turns.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from .conversations import ALL_KINDS, Chat, draw_exchange, held_out_chat, long_chat
from .template import render_answer

MAX_ANSWER = 192
"""The longest answer in tokens; the expected ones have at most half of it."""
LONG_KINDS = ("addition", "echo", "calendar", "pagewire", "capital")


@dataclass
class Score:
    """Right answers of one kind, and the wrong ones for reading."""

    right: int = 0
    total: int = 0
    wrong: list[dict[str, str]] = field(default_factory=list)

    @property
    def accuracy(self) -> float:
        return self.right / self.total if self.total else 0.0


@dataclass(frozen=True)
class Answer:
    """Generated text without the end mark, and whether that mark came."""

    text: str
    stopped: bool


class Reference:
    """The model in float32 under transformers, generating greedily."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        self.folder = folder
        self.tokenizer: Any = AutoTokenizer.from_pretrained(folder, padding_side="left")
        self.model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)

    def prompt_ids(self, chat: Chat) -> list[int]:
        """Token ids of a chat that waits for its answer."""
        encoded = self.tokenizer.apply_chat_template(
            chat.messages, tools=chat.tools, add_generation_prompt=True, return_dict=True
        )
        ids: list[int] = encoded["input_ids"]
        return ids

    def answers(self, chats: Sequence[Chat], batch: int = 64) -> Iterator[tuple[int, Answer]]:
        """Each chat's index with its answer, in batches of prompts of about one length."""
        prompts = [self.prompt_ids(chat) for chat in chats]
        order = sorted(range(len(prompts)), key=lambda index: len(prompts[index]))
        eos = self.tokenizer.eos_token_id
        for first in range(0, len(order), batch):
            chosen = order[first : first + batch]
            inputs = self.tokenizer.pad({"input_ids": [prompts[index] for index in chosen]}, return_tensors="pt")
            with torch.inference_mode():
                rows = self.model.generate(**inputs, max_new_tokens=MAX_ANSWER, do_sample=False)
            for index, row in zip(chosen, rows, strict=True):
                ids = row[inputs["input_ids"].shape[1] :].tolist()
                stopped = eos in ids
                ids = ids[: ids.index(eos)] if stopped else ids
                yield index, Answer(self.tokenizer.decode(ids), stopped)

    def answer(self, chat: Chat) -> Answer:
        return next(self.answers([chat]))[1]


def distinct_chats(rng: random.Random, kind: str, count: int) -> list[Chat]:
    """Held-out chats of a kind; fewer than requested if the kind has too few questions."""
    found: dict[str, Chat] = {}
    for _ in range(count * 4):
        chat = held_out_chat(rng, kind)
        said = "\n".join(str(message["content"]) for message in chat.messages)
        found.setdefault(said, chat)
        if len(found) == count:
            break
    return list(found.values())


def long_prompt(reference: Reference, rng: random.Random, tokens: int) -> Chat:
    """A chat of at least so many tokens, up to an answer, without the last question."""
    turns = tokens // 40
    while True:
        chat = long_chat(rng, turns)
        if len(reference.prompt_ids(chat)) >= tokens:
            return chat
        turns += turns // 8 + 1


def long_chats(reference: Reference, rng: random.Random, tokens: int, count: int) -> Iterator[Chat]:
    """Long chats that end in a held-out exchange of some plain kind."""
    for index in range(count):
        chat = long_prompt(reference, rng, tokens)
        exchange = draw_exchange(rng, LONG_KINDS[index % len(LONG_KINDS)], True)
        yield Chat([*chat.messages, *exchange.messages])


def score_chats(reference: Reference, named: Sequence[tuple[str, Chat]]) -> dict[str, Score]:
    """Scores by name of chats whose last message is the expected answer."""
    scores = {name: Score() for name, _ in named}
    prompts = [Chat(chat.messages[:-1], chat.tools) for _, chat in named]
    progress = tqdm(total=len(prompts), unit="prompt", mininterval=5)
    for index, answer in reference.answers(prompts):
        name, chat = named[index]
        expected = render_answer(chat.messages[-1])
        score = scores[name]
        score.total += 1
        if answer.stopped and answer.text == expected:
            score.right += 1
        else:
            asked = str(chat.messages[-2]["content"])
            got = answer.text if answer.stopped else f"{answer.text} [not stopped]"
            score.wrong.append({"asked": asked, "expected": expected, "got": got})
        progress.update()
    progress.close()
    return scores


def evaluate(reference: Reference, per_kind: int, seed: int) -> dict[str, Score]:
    """Scores of every kind on `per_kind` held-out prompts, sampled with the seed."""
    rng = random.Random(seed)
    named = [(kind, chat) for kind in ALL_KINDS for chat in distinct_chats(rng, kind, per_kind)]
    return score_chats(reference, named)


def total_of(scores: dict[str, Score]) -> Score:
    return Score(sum(s.right for s in scores.values()), sum(s.total for s in scores.values()))


def print_table(scores: dict[str, Score]) -> None:
    for name, score in [*scores.items(), ("total", total_of(scores))]:
        print(f"{name:16s} {score.right:5d} / {score.total:5d}  {100 * score.accuracy:6.1f} %")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m pagewire.tools.demo_model.evaluate",
        description="Greedy accuracy of the demo model on held-out prompts.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--model", type=Path, default=Path("demo_model"), metavar="FOLDER", help="the model")
    add("--per-kind", type=int, default=100, help="most prompts of a kind")
    add("--long", type=int, default=20, help="prompts of each long length")
    add("--seed", type=int, default=7, help="source of the prompts")
    add("--threads", type=int, default=1, help="CPU threads")
    add("--json", type=Path, metavar="FILE", help="write scores and wrong answers here")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    reference = Reference(options.model)
    scores = evaluate(reference, options.per_kind, options.seed)
    rng = random.Random(options.seed)
    for tokens in (1000, 3000, 6000):
        chats = [(f"long_{tokens}", c) for c in long_chats(reference, rng, tokens, options.long)]
        for single in chats:  # one at a time: a long batch needs much memory
            for name, score in score_chats(reference, [single]).items():
                known = scores.setdefault(name, Score())
                known.right += score.right
                known.total += score.total
                known.wrong += score.wrong
    print_table(scores)
    if options.json:
        report = {
            "total": {"right": total_of(scores).right, "of": total_of(scores).total},
            "kinds": {name: asdict(score) for name, score in scores.items()},
        }
        options.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
