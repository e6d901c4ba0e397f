"""Hermes' tool calls: the same events however the text is cut, calls as written, everything else as text."""

import random
import time

import pytest

from pagewire.api.parsers.hermes import CallArguments, CallStart, HermesParser, Text

CALL = '<tool_call>{"name": "f", "arguments": {"a": "x\\"}</tool_call>", "b": [1, {"c": null}]}}</tool_call>'
ARGUMENTS = '{"a": "x\\"}</tool_call>", "b": [1, {"c": null}]}'

CASES = {
    "text": ("just words", ["just words"]),
    "empty": ("", []),
    "call": (CALL, [("f", ARGUMENTS)]),
    "text and call": (f"Sure. \n{CALL}", ["Sure.", ("f", ARGUMENTS)]),
    "two calls": (f"{CALL}\n{CALL}\n", [("f", ARGUMENTS), ("f", ARGUMENTS)]),
    "text after": (f"{CALL}\nDone.", [("f", ARGUMENTS), "\nDone."]),
    "spaces inside": ('<tool_call>\n { "name" : "f" , "arguments" : { } }\n </tool_call>', [("f", "{ }")]),
    "arguments first": ('<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call>', [("f", '{"a": 1}')]),
    "arguments as a string": ('<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', [("f", '{"a": 1}')]),
    "no arguments": ('<tool_call>{"name": "f"}</tool_call>', [("f", "{}")]),
    "null arguments": ('<tool_call>{"name": "f", "arguments": null}</tool_call>', [("f", "{}")]),
    "parameters": ('<tool_call>{"name": "f", "parameters": {"a": 1}}</tool_call>', [("f", '{"a": 1}')]),
    "other keys": (
        '<tool_call>{"id": 5, "x": {"name": "no"}, "name": "f", "arguments": {}}</tool_call>',
        [("f", "{}")],
    ),
    "twice": ('<tool_call>{"name": "f", "arguments": {}, "arguments": {"a": 1}}</tool_call>', [("f", "{}")]),
    "never closed": (CALL.removesuffix("</tool_call>"), [("f", ARGUMENTS)]),
    "cut in the arguments": ('<tool_call>{"name": "f", "arguments": {"a": "b', [("f", '{"a": "b')]),
    "cut before the name": (' x <tool_call>{"na', [' x <tool_call>{"na']),
    "no object": ("a <tool_call>hello</tool_call> b", ["a <tool_call>hello</tool_call> b"]),
    "no name": ('<tool_call>{"arguments": {}}</tool_call>', ['<tool_call>{"arguments": {}}</tool_call>']),
    "name is no text": ('<tool_call>{"name": 5}</tool_call>', ['<tool_call>{"name": 5}</tool_call>']),
    "broken after the name": ('<tool_call>{"name": "f", oops}</tool_call>', [("f", "")]),
    "almost a tag": ("a <tool_cal", ["a <tool_cal"]),
    "a < b": ("if a < b <tool> c", ["if a < b <tool> c"]),
    "spaces at the end": ("words \n", ["words \n"]),
    "escapes in the name": ('<tool_call>{"name": "\\u0066", "arguments": {}}</tool_call>', [("f", "{}")]),
}


def parse(pieces: list[str]) -> list[str | tuple[str, str]]:
    """Texts and calls in order, neighbours joined."""
    parser = HermesParser()
    events = [event for piece in pieces for event in parser.push(piece)] + parser.flush()
    found: list[str | tuple[str, str]] = []
    for event in events:
        match event:
            case Text(text=text):
                assert text
                if found and isinstance(found[-1], str):
                    found[-1] += text
                else:
                    found.append(text)
            case CallStart(name=name):
                found.append((name, ""))
            case CallArguments(text=text):
                assert found and isinstance(found[-1], tuple) and text
                found[-1] = (found[-1][0], found[-1][1] + text)
    return found


@pytest.mark.parametrize("name", CASES)
def test_cases_whole_and_cut_everywhere(name: str) -> None:
    text, expected = CASES[name]
    assert parse([text]) == expected
    assert parse(list(text)) == expected
    for cut in range(len(text)):
        assert parse([text[:cut], text[cut:]]) == expected, cut


def test_random_text_does_not_depend_on_the_cuts() -> None:
    parts = [
        "<tool_call>",
        "</tool_call>",
        "{",
        "}",
        '"name"',
        '"arguments"',
        ":",
        ",",
        '"',
        "f",
        " ",
        "\n",
        "\\",
        "[1]",
        "<",
    ]
    for seed in range(3000):
        rng = random.Random(seed)
        text = "".join(rng.choices(parts, k=rng.randrange(30)))
        assert parse(list(text)) == parse([text]), f"seed {seed}: {text!r}"


def test_arguments_stream_as_they_come() -> None:
    parser = HermesParser()
    assert parser.push('<tool_call>{"name": "f", "arguments": {"a"') == [CallStart("f"), CallArguments('{"a"')]
    assert parser.push(": 1") == [CallArguments(": 1")]
    assert parser.push("}}") == [CallArguments("}")]


@pytest.mark.parametrize(
    "unit", ["<tool_call>", "<", " ", '<tool_call>{"a": ', "<tool_call>{", '<tool_call>{"arguments": [']
)
def test_adversarial_text_takes_linear_time(unit: str) -> None:
    def seconds(length: int) -> float:
        text = unit * (length // len(unit))
        start = time.perf_counter()
        parse([text[i : i + 8] for i in range(0, len(text), 8)])
        return time.perf_counter() - start

    assert min(seconds(200_000) for _ in range(2)) < 40 * max(min(seconds(20_000) for _ in range(3)), 1e-3)
