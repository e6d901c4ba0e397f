"""The data sets of `pagewire bench`: prompts of random words, and conversations in ShareGPT's shape.

Both are made here; a file in ShareGPT's format may be given as well. With a tokenizer lengths are exact, without one
they are estimated, and the server's usage says what they were.
"""

import argparse
import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path

from ...errors import ConfigError
from .load import Sample

_WORDS = [
    "the",
    "of",
    "and",
    "to",
    "in",
    "is",
    "that",
    "it",
    "was",
    "for",
    "on",
    "are",
    "as",
    "with",
    "his",
    "they",
    "at",
    "be",
    "this",
    "have",
    "from",
    "or",
    "one",
    "had",
    "by",
    "word",
    "but",
    "not",
    "what",
    "all",
    "were",
    "we",
    "when",
    "your",
    "can",
    "said",
    "there",
    "use",
    "an",
    "each",
    "which",
    "she",
    "do",
    "how",
    "their",
    "if",
    "will",
    "up",
    "other",
    "about",
    "out",
    "many",
    "then",
    "them",
    "these",
    "so",
    "some",
    "her",
    "would",
    "make",
    "like",
    "him",
    "into",
    "time",
    "has",
    "look",
    "two",
    "more",
    "write",
    "go",
    "see",
    "number",
    "no",
    "way",
    "could",
    "people",
    "my",
    "than",
    "first",
    "water",
    "been",
    "call",
    "who",
    "oil",
    "its",
    "now",
    "find",
    "long",
    "down",
    "day",
    "did",
    "get",
    "come",
    "made",
    "may",
    "part",
    "over",
    "new",
    "sound",
    "take",
    "only",
    "work",
]
_TOKENS_PER_WORD = 1.3  # of English prose, for texts whose tokens nobody counts
Encode = Callable[[str], Sequence[int]]


def add_flags(parser: argparse.ArgumentParser, *, num_prompts: int = 1000) -> None:
    """Adds the flags of `samples`."""
    group = parser.add_argument_group("data set")
    group.add_argument(
        "--dataset-name", choices=("random", "sharegpt"), default="random", help="kind of prompts (default: random)"
    )
    group.add_argument(
        "--dataset-path", metavar="FILE", help="conversations in ShareGPT's JSON format (default: made ones)"
    )
    group.add_argument(
        "--num-prompts", type=int, default=num_prompts, metavar="N", help=f"requests (default: {num_prompts})"
    )
    group.add_argument("--seed", type=int, default=0, metavar="N", help="of prompts and pauses (default: 0)")
    group.add_argument("--input-len", type=int, metavar="N", help="tokens of a prompt, for every data set")
    group.add_argument("--output-len", type=int, metavar="N", help="tokens of an output, for every data set")
    group.add_argument("--random-input-len", type=int, default=1024, metavar="N", help="of random (default: 1024)")
    group.add_argument("--random-output-len", type=int, default=128, metavar="N", help="of random (default: 128)")
    group.add_argument(
        "--random-range-ratio",
        type=float,
        default=0.0,
        metavar="R",
        help="lengths are between (1 - R) and (1 + R) times those, 0 ≤ R < 1 (default: 0)",
    )
    group.add_argument(
        "--random-prefix-len", type=int, default=0, metavar="N", help="tokens that all prompts begin with (default: 0)"
    )
    group.add_argument("--sharegpt-output-len", type=int, metavar="N", help="of sharegpt (default: those of the data)")
    group.add_argument(
        "--tokenizer", metavar="MODEL", help="folder or Hub name of a tokenizer that counts the prompts' tokens"
    )


def samples(arguments: argparse.Namespace, encode: Encode | None) -> list[Sample]:
    """The requests that the flags ask for. `encode`: counts tokens; None: they are estimated. Raises ConfigError."""
    if arguments.num_prompts < 1 or not 0 <= arguments.random_range_ratio < 1:
        raise ConfigError("--num-prompts must be at least 1, and --random-range-ratio from 0 to less than 1.")
    draw = random.Random(arguments.seed)
    if arguments.dataset_name == "sharegpt":
        turns = _made_turns(draw, arguments.num_prompts) if arguments.dataset_path is None else _read_turns(arguments)
        return _sharegpt(draw, turns, arguments, encode)
    if arguments.dataset_path is not None:
        raise ConfigError("--dataset-path is for --dataset-name sharegpt.")
    num_prompt = arguments.input_len or arguments.random_input_len
    num_output = arguments.output_len or arguments.random_output_len
    if min(num_prompt, num_output) < 1 or arguments.random_prefix_len < 0:
        raise ConfigError("Lengths must be at least 1.")
    prefix = _text(draw, arguments.random_prefix_len, encode)
    found = []
    for _ in range(arguments.num_prompts):
        text = prefix + _text(draw, _around(draw, num_prompt, arguments.random_range_ratio), encode)
        found.append(Sample(text, _count(text, encode), _around(draw, num_output, arguments.random_range_ratio)))
    return found


def _around(draw: random.Random, length: int, ratio: float) -> int:
    return draw.randint(max(1, round(length * (1 - ratio))), max(1, round(length * (1 + ratio))))


def _text(draw: random.Random, num_tokens: int, encode: Encode | None) -> str:
    """Random words of about `num_tokens` tokens: exactly so with a tokenizer, but for the words at the cut."""
    if num_tokens == 0:
        return ""
    words = [draw.choice(_WORDS) for _ in range(num_tokens)]
    if encode is None:
        return " ".join(words) + " "
    low, high = 1, len(words)  # the most words that have at most `num_tokens` tokens
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if len(encode(" ".join(words[:middle]))) <= num_tokens else (low, middle - 1)
    return " ".join(words[:low]) + " "


def _count(text: str, encode: Encode | None) -> int:
    return len(text.split()) if encode is None else len(encode(text))


def _made_turns(draw: random.Random, num: int) -> list[tuple[str, str]]:
    """Questions and answers with the spread of lengths of ShareGPT: most are short, a few are very long."""

    def words(median: float) -> str:
        return " ".join(
            draw.choice(_WORDS) for _ in range(max(3, min(800, round(draw.lognormvariate(0, 1.1) * median))))
        )

    return [(words(45), words(140)) for _ in range(num)]


def _read_turns(arguments: argparse.Namespace) -> list[tuple[str, str]]:
    path = Path(arguments.dataset_path)
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        turns = [[str(turn["value"]) for turn in one["conversations"][:2]] for one in found]
    except OSError as error:
        raise ConfigError(f"--dataset-path {path} cannot be read: {error.strerror}.") from error
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"--dataset-path {path} is no list of ShareGPT's conversations.") from error
    return [(turn[0], turn[1]) for turn in turns if len(turn) == 2]


def _sharegpt(
    draw: random.Random, turns: list[tuple[str, str]], arguments: argparse.Namespace, encode: Encode | None
) -> list[Sample]:
    """The first question of each conversation, as vLLM takes them: neither shorter than 4 tokens nor longer than 1,024,
    nor 2,048 with the answer. What is missing is drawn again."""
    draw.shuffle(turns)
    fixed = arguments.output_len or arguments.sharegpt_output_len
    usable = []
    for question, answer in turns:
        num_prompt = round(_count(question, encode) * (1 if encode else _TOKENS_PER_WORD))
        num_output = fixed or round(_count(answer, encode) * (1 if encode else _TOKENS_PER_WORD))
        if (
            num_prompt >= 4
            and num_output >= (1 if fixed else 4)
            and num_prompt <= 1024
            and num_prompt + num_output <= 2048
        ):
            usable.append(Sample(question, num_prompt, num_output))
    if not usable:
        raise ConfigError("The data set has no conversation of a usable length.")
    missing = arguments.num_prompts - len(usable)
    return [*usable, *(draw.choice(usable) for _ in range(missing))][: arguments.num_prompts]
