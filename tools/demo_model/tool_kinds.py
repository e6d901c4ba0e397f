"""Function tools, questions that call for them, and answers from their results.

Half of the tools are the usual ones (weather, time, prices), half have made-up
names and parameters, so that the model has to copy them from the list of tools.
A `ToolCase` is one tool with a way to ask for it; its values are drawn per question.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from . import facts
from .phrasing import made_up_word, some_name, some_words, vary

Random = random.Random
Draw = Callable[[Random], str | int]


@dataclass(frozen=True)
class ToolCase:
    """One function: its parameters with a source of values each, and question forms.

    A form holds `{parameter}` where a value goes; `results` names what a call returns.
    """

    name: str
    description: str
    parameters: dict[str, Draw]
    forms: tuple[str, ...]
    results: tuple[str, ...] = ("result",)


def _city(rng: Random) -> str:
    return rng.choice(facts.CITIES) if rng.random() < 0.5 else made_up_word(rng).capitalize()


def _country(rng: Random) -> str:
    return rng.choice(list(facts.CAPITALS)) if rng.random() < 0.6 else some_name(rng)


def _word(rng: Random) -> str:
    return rng.choice(facts.WORDS) if rng.random() < 0.6 else made_up_word(rng)


def _words(rng: Random) -> str:
    return some_words(rng, 1, 3) if rng.random() < 0.7 else made_up_word(rng)


def _number(rng: Random) -> int:
    return rng.randint(0, 99)


KNOWN_TOOLS: tuple[ToolCase, ...] = (
    ToolCase(
        "get_weather",
        "Get the weather of a city",
        {"city": _city},
        (
            "What is the weather in {city}?",
            "How is the weather in {city}?",
            "What's the weather like in {city}?",
            "Weather in {city}?",
            "Is it raining in {city}?",
            "Tell me the weather in {city}",
        ),
        ("weather", "temperature"),
    ),
    ToolCase(
        "get_time",
        "Get the time in a city",
        {"city": _city},
        ("What time is it in {city}?", "Time in {city}?", "Tell me the time in {city}"),
        ("time",),
    ),
    ToolCase(
        "add",
        "Add two numbers",
        {"a": _number, "b": _number},
        ("Add {a} and {b}", "What is {a} + {b}?", "What is the sum of {a} and {b}?"),
        ("sum",),
    ),
    ToolCase(
        "multiply",
        "Multiply two numbers",
        {"a": _number, "b": _number},
        ("Multiply {a} and {b}", "What is {a} * {b}?", "What is {a} times {b}?"),
        ("product",),
    ),
    ToolCase(
        "get_price",
        "Get the price of an item",
        {"item": _word},
        ("What is the price of the {item}?", "How much is the {item}?", "Price of {item}?"),
        ("price",),
    ),
    ToolCase(
        "get_population",
        "Get the population of a country",
        {"country": _country},
        ("How many people live in {country}?", "What is the population of {country}?"),
        ("population",),
    ),
    ToolCase(
        "set_timer",
        "Set a timer",
        {"minutes": _number},
        ("Set a timer for {minutes} minutes", "Start a timer of {minutes} minutes"),
        ("status",),
    ),
    ToolCase(
        "search",
        "Search the web",
        {"query": _words},
        ("Search for {query}", "Search the web for {query}", "Look for {query}"),
        ("found",),
    ),
    ToolCase(
        "book_table",
        "Book a table",
        {"name": some_name, "people": _number},
        (
            "Book a table for {people} people under the name {name}",
            "Book a table for {name} with {people} people",
        ),
        ("status",),
    ),
    ToolCase(
        "send_message",
        "Send a message to a person",
        {"to": some_name, "text": _words},
        ('Send "{text}" to {to}', "Send {to} the message {text}", "Tell {to} that {text}"),
        ("status",),
    ),
)
VERBS = (
    "get",
    "find",
    "set",
    "send",
    "open",
    "read",
    "make",
    "order",
    "check",
    "play",
    "show",
    "buy",
    "save",
    "load",
    "update",
)
PARAMETER_NAMES: dict[str, Draw] = {
    **dict.fromkeys(("city", "place", "location", "town"), _city),
    **dict.fromkeys(("name", "user", "person"), some_name),
    **dict.fromkeys(("item", "word", "title", "color", "kind", "key"), _word),
    **dict.fromkeys(("text", "query", "note"), _words),
    **dict.fromkeys(("count", "number", "amount", "size", "id", "price", "year"), _number),
}


def made_up_tool(rng: Random) -> ToolCase:
    """A new random function with one or two parameters."""
    verb = rng.choice((*facts.REQUEST_VERBS, *VERBS))
    noun = rng.choice(facts.WORDS + facts.TOPICS) if rng.random() < 0.6 else made_up_word(rng)
    name = f"{verb}_{noun}" if rng.random() < 0.9 else f"{noun}_{made_up_word(rng)}"
    chosen = rng.sample(list(PARAMETER_NAMES), rng.choice((1, 1, 2)))
    listed = " and ".join(f"{key} {{{key}}}" for key in chosen)
    forms = [
        f"{verb.capitalize()} the {noun} with {listed}",
        f"{verb.capitalize()} {noun} with {listed}",
        f"Call {name} with {listed}",
        f"Use {name} with {listed}",
        f"Can you {verb} the {noun} with {listed}?",
        f"{verb.capitalize()} {noun}: {listed}",
    ]
    if len(chosen) == 1:
        value = f"{{{chosen[0]}}}"
        forms += [
            f"{verb.capitalize()} the {noun} of {value}",
            f"{verb.capitalize()} the {noun} for {value}",
            f"What is the {noun} of {value}?",
            f"Call {name} for {value}",
        ]
    results = rng.sample(("result", "status", "value", "price", "level", "state", noun), 1)
    return ToolCase(
        name,
        f"{verb.capitalize()} the {noun}",
        {key: PARAMETER_NAMES[key] for key in chosen},
        tuple(forms),
        tuple(results),
    )


def declaration(rng: Random, case: ToolCase) -> dict[str, Any]:
    """The tool as an OpenAI client declares it, with some of the usual differences."""
    properties: dict[str, Any] = {}
    detailed = rng.random() < 0.25
    for key, draw in case.parameters.items():
        number = rng.choice(("integer", "number")) if draw is _number else "string"
        properties[key] = {"type": number}
        if detailed:
            properties[key]["description"] = f"The {key}"
    schema: dict[str, Any] = {"type": "object", "properties": properties}
    if rng.random() < 0.8:
        schema["required"] = list(properties)
    function: dict[str, Any] = {"name": case.name}
    if rng.random() < 0.85:
        function["description"] = case.description + rng.choice(("", "", "."))
    function["parameters"] = schema
    return {"type": "function", "function": function}


def draw_cases(rng: Random) -> list[ToolCase]:
    """One to three tools of different names."""
    cases: dict[str, ToolCase] = {}
    for _ in range(rng.choice((1, 1, 1, 2, 2, 3))):
        case = rng.choice(KNOWN_TOOLS) if rng.random() < 0.45 else made_up_tool(rng)
        cases.setdefault(case.name, case)
    return list(cases.values())


def question(rng: Random, case: ToolCase) -> tuple[str, dict[str, Any]]:
    """A user prompt and the assistant message that calls the tool for it."""
    arguments = {key: draw(rng) for key, draw in case.parameters.items()}
    prompt = vary(rng, rng.choice(case.forms).format(**arguments))
    function = {"name": case.name, "arguments": arguments}
    call = {"type": "function", "function": function}
    return prompt, {"role": "assistant", "content": "", "tool_calls": [call]}


def _result_value(rng: Random, key: str) -> str | int | float:
    if key == "weather":
        return rng.choice(("sunny", "cloudy", "rainy", "windy", "snowy"))
    if key == "time":
        return f"{rng.randint(0, 23)}:{rng.randint(10, 59)}"
    if key == "temperature":
        return rng.randint(-9, 35)
    if key == "status":
        return rng.choice(("ok", "done", "failed", "sent"))
    choice = rng.random()
    if choice < 0.5:
        return rng.randint(0, 9999) if choice < 0.2 else rng.randint(0, 99)
    if choice < 0.6:
        return rng.randint(0, 99) + rng.randint(1, 9) / 10
    return _words(rng) if choice < 0.8 else made_up_word(rng)


def result(rng: Random, case: ToolCase) -> tuple[str, str]:
    """What the tool returns (JSON or plain text) and the sentence that answers from it."""
    values = {key: _result_value(rng, key) for key in case.results}
    if rng.random() < 0.3:
        plain = ", ".join(str(value) for value in values.values())
        return plain, f"The answer is {plain}."
    if rng.random() < 0.25:
        key, draw = next(iter(case.parameters.items()))
        values = {key: draw(rng), **values}
    parts = [f"the {key} is {value}" for key, value in values.items()]
    sentence = " and ".join(parts) if len(parts) < 3 else f"{parts[0]}, {parts[1]} and {parts[2]}"
    return json.dumps(values), f"{sentence[0].upper()}{sentence[1:]}."
