"""Prompts of benchmarks."""

import argparse
import json
from pathlib import Path

import pytest

from pagewire.commands.bench.datasets import add_flags, samples
from pagewire.commands.bench.load import Sample
from pagewire.errors import ConfigError


def made(*argv: str, counts: bool = True) -> list[Sample]:
    parser = argparse.ArgumentParser()
    add_flags(parser)
    return samples(parser.parse_args(argv), (lambda text: [1] * len(text.split())) if counts else None)


def test_random_prompts_have_the_lengths_that_are_asked_for() -> None:
    found = made(
        "--num-prompts", "5", "--random-input-len", "7", "--random-output-len", "3", "--random-prefix-len", "4"
    )
    assert [(one.num_prompt, one.num_output) for one in found] == [(11, 3)] * 5
    texts = [str(one.prompt).split() for one in found]
    assert len({tuple(words[:4]) for words in texts}) == 1 and len({tuple(words) for words in texts}) == 5
    assert made("--num-prompts", "5", "--random-input-len", "7") == made(
        "--num-prompts", "5", "--random-input-len", "7"
    )
    assert made("--num-prompts", "1", "--seed", "1") != made("--num-prompts", "1")
    assert made("--num-prompts", "1", "--input-len", "9", "--output-len", "2", counts=False)[0].num_prompt == 9


def test_lengths_vary_within_the_ratio() -> None:
    found = made("--num-prompts", "300", "--input-len", "10", "--output-len", "20", "--random-range-ratio", "0.5")
    assert {one.num_prompt for one in found} == {*range(5, 16)} and {one.num_output for one in found} == {
        *range(10, 31)
    }


@pytest.mark.parametrize("counts", [True, False])
def test_made_conversations_have_the_shape_of_sharegpt(counts: bool) -> None:
    found = made("--num-prompts", "200", "--dataset-name", "sharegpt", counts=counts)
    lengths = sorted(one.num_prompt for one in found)
    assert len(found) == 200 and lengths[0] >= 4 and lengths[-1] <= 1024
    assert lengths[180] > 3 * lengths[100], "a few are much longer than most"
    assert all(4 <= one.num_output <= 2048 - one.num_prompt for one in found)


def test_a_file_of_conversations(tmp_path: Path) -> None:
    path = tmp_path / "conversations.json"
    turns = [("one two three four five", "a b c d e f"), ("too short", "a b c d"), ("one two three four", "ends")]
    content = [{"conversations": [{"from": "human", "value": q}, {"from": "gpt", "value": a}]} for q, a in turns]
    path.write_text(json.dumps([*content, {"conversations": []}]))
    flags = ("--dataset-name", "sharegpt", "--dataset-path", str(path), "--num-prompts", "3")
    assert made(*flags) == [Sample(turns[0][0], 5, 6)] * 3
    assert {one.num_output for one in made(*flags, "--sharegpt-output-len", "2")} == {2}


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        (["--num-prompts", "0"], "--num-prompts must be at least 1"),
        (["--random-range-ratio", "1"], "--num-prompts must be at least 1, and --random-range-ratio from 0"),
        (["--input-len", "-1"], "Lengths must be at least 1."),
        (["--dataset-path", "x"], "--dataset-path is for --dataset-name sharegpt."),
        (["--dataset-name", "sharegpt", "--dataset-path", "/nowhere"], "--dataset-path /nowhere cannot be read: "),
        (["--dataset-name", "sharegpt", "--dataset-path", __file__], "is no list of ShareGPT's conversations."),
    ],
)
def test_what_cannot_be_made_is_refused(argv: list[str], sentence: str) -> None:
    with pytest.raises(ConfigError) as error:
        made(*argv)
    assert sentence in str(error.value)
