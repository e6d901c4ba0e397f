"""Words, names and the many ways to put one prompt.

What all kinds of exchanges draw from: known and made-up words, and `vary`, which gives
a prompt another opening, case or closing mark.
"""

from __future__ import annotations

import random

from . import facts

Random = random.Random


def made_up_word(rng: Random) -> str:
    """A word of two or three syllables that no list holds, so it has to be copied."""
    return "".join(rng.choice(facts.SYLLABLES) for _ in range(rng.choice((2, 2, 3))))


def some_name(rng: Random) -> str:
    """A person's name, known or made up."""
    return rng.choice(facts.NAMES) if rng.random() < 0.5 else made_up_word(rng).capitalize()


def some_words(rng: Random, low: int, high: int) -> str:
    """From `low` to `high` known words."""
    return " ".join(rng.choice(facts.WORDS) for _ in range(rng.randint(low, high)))


def with_article(noun: str) -> str:
    """The noun behind "a" or "an"."""
    return f"{'an' if noun[0] in 'aeiou' else 'a'} {noun}"


def vary(rng: Random, prompt: str, lower: bool = False) -> str:
    """A prompt with another opening, case or closing mark; `lower` allows all lower case."""
    if rng.random() < 0.2:
        opening = rng.choice(("Please ", "Hey, ", "Hi, ", "So, ", "Ok, ", "Now ", "And "))
        prompt = opening + prompt[0].lower() + prompt[1:]
    if lower and rng.random() < 0.2:
        prompt = prompt.lower()
    elif rng.random() < 0.25:
        prompt = prompt[0].lower() + prompt[1:]
    if prompt.endswith("?"):
        if rng.random() < 0.25:
            prompt = prompt[:-1]
    elif prompt[-1].isalpha() and rng.random() < 0.25:
        prompt += rng.choice(".!")
    return prompt
