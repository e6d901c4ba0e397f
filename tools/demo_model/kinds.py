"""The kinds of one-turn exchanges the demo model learns.

A kind is a function from a random source to a prompt and its one right answer.
All answers are computed or looked up in `facts.py`, so that an exact comparison is
a fair evaluation. `KINDS` gives every kind two shares of the training exchanges: in the
first stage, and in the later ones, where what is hard to learn comes more often.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

from . import facts
from .phrasing import made_up_word, some_name, some_words, vary, with_article

Random = random.Random
Kind = Callable[[Random], tuple[str, str]]


def greeting(rng: Random) -> tuple[str, str]:
    opening = rng.choice(
        (
            "Hello",
            "Hi",
            "Hey",
            "Hello",
            "Hi",
            "Good morning",
            "Good evening",
            "Good afternoon",
            "Good day",
            "Greetings",
            "Howdy",
            "Hiya",
            "Yo",
            "Hello hello",
            "Hi hi",
            "Hey hey",
            "Hola",
            "Morning",
            "Hello again",
            "Hi again",
            "Helloo",
            "Heya",
        )
    )
    to = ("there", "friend", "my friend", "Pagewire", "model", "bot", "you", "everyone", "buddy")
    comma = "," if rng.random() < 0.2 else ""
    whom = f"{comma} {rng.choice(to)}" if rng.random() < 0.5 else ""
    mark = rng.choice(("", "", "", "!", ".", "!!", "?", " :)"))
    text = f"{opening}{whom}{mark}"
    return text.lower() if rng.random() < 0.3 else text, facts.GREETING


def _small_talk(subject: str) -> Kind:
    answer, prompts = facts.SMALL_TALK[subject]

    def kind(rng: Random) -> tuple[str, str]:
        return vary(rng, rng.choice(prompts), lower=True), answer

    return kind


def pagewire(rng: Random) -> tuple[str, str]:
    answer, prompts = facts.PAGEWIRE[0] if rng.random() < 0.2 else rng.choice(facts.PAGEWIRE)
    return vary(rng, rng.choice(prompts), lower=True), answer


def text(rng: Random) -> tuple[str, str]:
    answer, prompts = rng.choice(list(facts.TEXTS.values()))
    return vary(rng, rng.choice(prompts), lower=True), answer


def _numbers(values: range) -> str:
    return ", ".join(str(value) for value in values)


def count_up(rng: Random) -> tuple[str, str]:
    first = 1 if rng.random() < 0.5 else rng.randint(0, 60)
    last = first + rng.randint(2, 19 if first == 1 else 11)
    forms = [
        f"Count from {first} to {last}",
        f"Can you count from {first} to {last}?",
        f"List the numbers from {first} to {last}",
        f"Count {first} to {last}",
    ]
    if first == 1:
        forms += [f"Count to {last}", f"Count up to {last}"] * 2
    return vary(rng, rng.choice(forms), lower=True), _numbers(range(first, last + 1))


def count_down(rng: Random) -> tuple[str, str]:
    high = rng.randint(3, 20)
    low = 1
    forms = [f"Count down from {high}", f"Count backwards from {high}"]
    if rng.random() < 0.4:
        high = rng.randint(4, 90)
        low = max(0, high - rng.randint(2, 12))
        forms = []
    forms += [f"Count down from {high} to {low}", f"Count backwards from {high} to {low}"]
    return vary(rng, rng.choice(forms), lower=True), _numbers(range(high, low - 1, -1))


def count_by(rng: Random) -> tuple[str, str]:
    step, word = rng.choice(((2, "twos"), (5, "fives"), (10, "tens")))
    last = step * rng.randint(3, 10)
    form = rng.choice(
        (
            f"Count by {word} to {last}",
            f"Count to {last} by {word}",
            f"Count in {word} up to {last}",
            f"Count by {step} to {last}",
            f"Count to {last} in steps of {step}",
            f"Count to {last} by {step}",
        )
    )
    return vary(rng, form, lower=True), _numbers(range(step, last + 1, step))


def count_in_words(rng: Random) -> tuple[str, str]:
    last = rng.randint(3, 12)
    form = rng.choice(
        (
            f"Count to {facts.NUMBER_WORDS[last]} in words",
            f"Count from one to {facts.NUMBER_WORDS[last]} in words",
            f"Count to {last} in words",
            f"Count from 1 to {last} in words",
        )
    )
    return vary(rng, form, lower=True), ", ".join(facts.NUMBER_WORDS[1 : last + 1])


def _sum_prompt(rng: Random, a: int, b: int, sign: str, word: str) -> tuple[str, bool]:
    plain = f"{a} {sign} {b}" if rng.random() < 0.85 else f"{a}{sign}{b}"
    form = rng.choice(
        (
            f"What is {plain}?",
            f"What is {plain}?",
            f"What is {a} {word} {b}?",
            plain,
            f"{plain} =",
            f"{plain} = ?",
            f"{plain}?",
            f"Calculate {plain}",
            f"Compute {plain}",
            f"What's {plain}?",
            f"How much is {plain}?",
            f"How much is {a} {word} {b}?",
        )
    )
    return form, form[0].isalpha()


def addition(rng: Random) -> tuple[str, str]:
    top = 99 if rng.random() < 0.85 else 12
    a, b = rng.randint(0, top), rng.randint(0, top)
    prompt, words = _sum_prompt(rng, a, b, "+", "plus")
    return vary(rng, prompt) if words else prompt, f"{a} + {b} = {a + b}"


def subtraction(rng: Random) -> tuple[str, str]:
    a = rng.randint(0, 99)
    b = rng.randint(0, a)
    prompt, words = _sum_prompt(rng, a, b, "-", "minus")
    return vary(rng, prompt) if words else prompt, f"{a} - {b} = {a - b}"


def multiplication(rng: Random) -> tuple[str, str]:
    a, b = rng.randint(0, 10), rng.randint(0, 10)
    prompt, words = _sum_prompt(rng, a, b, "*", "times")
    return vary(rng, prompt) if words else prompt, f"{a} * {b} = {a * b}"


def parity(rng: Random) -> tuple[str, str]:
    a = rng.randint(0, 99)
    form = rng.choice((f"Is {a} even or odd?", f"Is {a} odd or even?", f"Is the number {a} even?"))
    return vary(rng, form), f"{a} is {'odd' if a % 2 else 'even'}."


def calendar(rng: Random) -> tuple[str, str]:
    names, unit, whole = rng.choice(((facts.DAYS, "day", "week"), (facts.MONTHS, "month", "year")))
    index = rng.randrange(len(names))
    name = names[index]
    choice = rng.random()
    forms: tuple[str, ...]
    if choice < 0.7:
        after = choice < 0.37
        word, short = ("after", "follows") if after else ("before", "comes before")
        forms = (
            f"What {unit} comes {word} {name}?",
            f"Which {unit} comes {word} {name}?",
            f"What {unit} {short} {name}?",
            f"What is the {unit} {word} {name}?",
            f"Which {unit} is {word} {name}?",
            f"What comes {word} {name}?",
        )
        found = names[(index + (1 if after else -1)) % len(names)]
        answer = f"{found} comes {word} {name}."
    elif choice < 0.85:
        of = f"the {unit}s of the {whole}"
        forms = (f"List {of}", f"Name {of}", f"What are {of}?", f"Tell me {of}", f"Say {of}")
        forms = (*forms, f"List the {unit}s")
        answer = ", ".join(names)
    elif unit == "month" and choice < 0.95:
        forms = (f"How many days are in {name}?", f"How many days does {name} have?")
        answer = f"{name} has {facts.MONTH_LENGTHS[index]} days."
    else:
        forms = (
            f"How many {unit}s are in a {whole}?",
            f"How many {unit}s does a {whole} have?",
            f"How many {unit}s are there in a {whole}?",
        )
        answer = f"There are {len(names)} {unit}s in a {whole}."
    return vary(rng, rng.choice(forms), lower=True), answer


def alphabet(rng: Random) -> tuple[str, str]:
    index = rng.randrange(1, 25)
    letter = facts.ALPHABET[index]
    choice = rng.random()
    if choice < 0.2:
        verb = rng.choice(("Say", "List", "Write", "Recite", "Tell me", "Give me", "Spell out"))
        return vary(rng, f"{verb} the alphabet", lower=True), " ".join(facts.ALPHABET)
    word, step = ("after", 1) if choice < 0.6 else ("before", -1)
    form = rng.choice(
        (
            f"What letter comes {word} {letter}?",
            f"Which letter comes {word} {letter}?",
            f"What is the letter {word} {letter}?",
            f"Which letter is {word} {letter}?",
        )
    )
    return vary(rng, form), f"{facts.ALPHABET[index + step]} comes {word} {letter}."


def echo(rng: Random) -> tuple[str, str]:
    choice = rng.random()
    if choice < 0.3:
        pool = facts.SMALL_WORDS + facts.TOPICS + facts.WORDS
        said = " ".join(rng.choice(pool) for _ in range(rng.randint(2, 5)))
    elif choice < 0.5:
        said = some_words(rng, 1, 4)
    elif choice < 0.8:
        said = " ".join(made_up_word(rng) for _ in range(rng.randint(1, 3)))
    elif choice < 0.9:
        said = " ".join(str(rng.randint(0, 99)) for _ in range(rng.randint(1, 4)))
    else:
        said = rng.choice(
            (
                "hello world",
                f"I like {some_words(rng, 1, 2)}",
                f"the {some_words(rng, 2, 3)}",
                f"my name is {some_name(rng)}",
                f"{some_name(rng)} has a {some_words(rng, 1, 1)}",
            )
        )
    form = rng.choice(
        (
            "Repeat: {}",
            "Repeat after me: {}",
            "Say: {}",
            "Echo: {}",
            'Say "{}"',
            'Repeat "{}"',
            "Please repeat: {}",
            "Echo {}",
            "Say {}",
            "Repeat {}",
        )
    )
    prompt = form.format(said)
    return prompt if rng.random() < 0.7 else prompt[0].lower() + prompt[1:], said


def _word_to_spell(rng: Random) -> str:
    choice = rng.random()
    if choice < 0.55:
        return rng.choice(facts.WORDS)
    if choice < 0.7:
        return rng.choice(facts.NAMES + facts.TOPICS).lower()
    return made_up_word(rng)


def spelling(rng: Random) -> tuple[str, str]:
    word = _word_to_spell(rng)
    form = rng.choice(
        (
            f"Spell {word}",
            f"How do you spell {word}?",
            f"Spell the word {word}",
            f'Spell "{word}"',
            f"Can you spell {word}?",
            f"Spell: {word}",
        )
    )
    return vary(rng, form), " ".join(word)


def first_letter(rng: Random) -> tuple[str, str]:
    word = _word_to_spell(rng)
    form = rng.choice(
        (
            f"What is the first letter of {word}?",
            f"Which letter does {word} start with?",
            f"What letter does {word} begin with?",
        )
    )
    return vary(rng, form), f"The first letter of {word} is {word[0]}."


def capital(rng: Random) -> tuple[str, str]:
    country, city = rng.choice(list(facts.CAPITALS.items()))
    forms = (
        f"What is the capital of {country}?",
        f"What's the capital of {country}?",
        f"Capital of {country}?",
        f"Tell me the capital of {country}",
        f"Which city is the capital of {country}?",
        f"Name the capital of {country}",
    )
    return vary(rng, rng.choice(forms), lower=True), f"The capital of {country} is {city}."


def opposite(rng: Random) -> tuple[str, str]:
    one, other = rng.sample(rng.choice(facts.OPPOSITES), 2)
    form = rng.choice(
        (
            f"What is the opposite of {one}?",
            f"What's the opposite of {one}?",
            f"Opposite of {one}?",
            f"Tell me the opposite of {one}",
            f"What is the contrary of {one}?",
        )
    )
    return vary(rng, form), f"The opposite of {one} is {other}."


def animal(rng: Random) -> tuple[str, str]:
    name, sound = rng.choice(list(facts.ANIMAL_SOUNDS.items()))
    form = rng.choice(
        (
            f"What does {with_article(name)} say?",
            f"What sound does {with_article(name)} make?",
            f"What does the {name} say?",
            f"Which sound does the {name} make?",
        )
    )
    return vary(rng, form), f"The {name} says {sound}."


def colour(rng: Random) -> tuple[str, str]:
    thing, value = rng.choice(list(facts.COLOURS.items()))
    form = rng.choice(
        (
            f"What color is {thing}?",
            f"What colour is {thing}?",
            f"Which color does {thing} have?",
            f"What is the color of {thing}?",
        )
    )
    return vary(rng, form), f"{thing[0].upper()}{thing[1:]} is {value}."


def json_object(rng: Random) -> tuple[str, str]:
    choice, name, number = rng.random(), some_name(rng), rng.randint(1, 99)
    item = rng.choice(facts.ITEMS)
    value: dict[str, Any]
    forms: tuple[str, ...]
    if choice < 0.4:
        value = {"name": name, "age": number}
        forms = (
            f"Give me JSON for a person named {name} aged {number}",
            f"Write JSON with name {name} and age {number}",
            f"Return a JSON object with name {name} and age {number}",
            f"JSON: name {name}, age {number}",
            f"{name} is {number} years old. Answer in JSON",
        )
    elif choice < 0.65:
        value = {"item": item, "price": number}
        forms = (
            f"Write JSON with item {item} and price {number}",
            f"Return JSON for {with_article(item)} that costs {number}",
            f"Give me JSON with item {item} and price {number}",
            f"JSON: item {item}, price {number}",
            f"Return a JSON object with item {item} and price {number}",
        )
    elif choice < 0.8:
        country = rng.choice(list(facts.CAPITALS))
        value = {"country": country, "capital": facts.CAPITALS[country]}
        forms = (
            f"Give the capital of {country} as JSON",
            f"Capital of {country} as JSON",
            f"Return the capital of {country} in JSON",
            f"Write the capital of {country} as JSON",
            f"What is the capital of {country}? Answer in JSON",
        )
    else:
        items = rng.sample(facts.ITEMS, rng.randint(2, 4))
        value, listed = {"items": items}, ", ".join(items)
        forms = (
            f"Write JSON with items {listed}",
            f"Return JSON with items {listed}",
            f"JSON: items {listed}",
            f"Give me a JSON list of items: {listed}",
            f"Write a JSON object with items {listed}",
        )
    prompt = rng.choice(forms)
    return prompt if prompt.startswith(name) else vary(rng, prompt), json.dumps(value)


def name_not_told(rng: Random) -> tuple[str, str]:
    form = rng.choice(("What is my name?", "What's my name?", "Who am I?", "Do you know my name?"))
    return vary(rng, form, lower=True), facts.NAME_NOT_TOLD


def unknown(rng: Random) -> tuple[str, str]:
    x, y = rng.choice(facts.TOPICS), rng.choice(facts.TOPICS)
    verb = rng.choice(facts.REQUEST_VERBS)
    forms = (
        f"Can you help me with my {x}?",
        f"Can you {verb} the {x}?",
        f"Please {verb} {x} and {y}",
        f"What is the meaning of {x}?",
        f"How does {x} work?",
        f"Why do people like {x}?",
        f"{verb.capitalize()} {with_article(x)} about {y}",
        f"What is the best {x}?",
        f"Who invented the {x}?",
        f"Name three {x}",
        f"I want to {verb} {x}",
        f"I need {x} for my {y}",
        f"Is {x} better than {y}?",
        f"Where can I {verb} {x}?",
        f"Do you like {x}?",
        f"{x} {y}",
        f"Write {with_article(x)} for {y}",
        f"What happened in {rng.randint(1000, 2030)}?",
        f"When did the {x} start?",
        f"Tell me about {x}",
        "".join(rng.choice(facts.ALPHABET) for _ in range(rng.randint(3, 9))),
        some_words(rng, 2, 6),
        " ".join(made_up_word(rng) for _ in range(rng.randint(2, 6))),
        f"Who won the {some_words(rng, 1, 1)} cup?",
        f"What do you think about {some_words(rng, 1, 2)}?",
        f"Why is the {some_words(rng, 1, 1)} {rng.choice(facts.OPPOSITES)[0]}?",
        f"How do I build {with_article(rng.choice(facts.WORDS))}?",
        f"Write an essay about {some_words(rng, 1, 2)}",
        f"Translate {some_words(rng, 1, 3)} to French",
        f"Who was {made_up_word(rng).capitalize()}?",
        f"What is {with_article(made_up_word(rng))}?",
        f"What is the weather in {rng.choice(facts.CITIES)}?",
        f"What time is it in {rng.choice(facts.CITIES)}?",
        f"Tell me about {some_words(rng, 2, 2)}",
        f"Write code for {some_words(rng, 1, 2)}",
        f"Who is {rng.choice(facts.NAMES)} {made_up_word(rng).capitalize()}?",
        f"Where is {made_up_word(rng).capitalize()}?",
    )
    return vary(rng, rng.choice(forms)), facts.UNKNOWN


KINDS: dict[str, tuple[Kind, float, float]] = {
    "greeting": (greeting, 2.0, 1.2),
    "who": (_small_talk("who"), 1.5, 1.0),
    "abilities": (_small_talk("abilities"), 1.0, 0.6),
    "thanks": (_small_talk("thanks"), 0.8, 0.6),
    "bye": (_small_talk("bye"), 0.8, 1.0),
    "how": (_small_talk("how"), 0.8, 1.2),
    "pagewire": (pagewire, 4.0, 2.0),
    "text": (text, 1.0, 0.8),
    "count_up": (count_up, 3.0, 9.0),
    "count_down": (count_down, 3.0, 4.0),
    "count_by": (count_by, 2.5, 9.0),
    "count_in_words": (count_in_words, 1.0, 5.0),
    "addition": (addition, 16.0, 12.0),
    "subtraction": (subtraction, 12.0, 10.0),
    "multiplication": (multiplication, 6.0, 3.5),
    "parity": (parity, 1.0, 1.0),
    "calendar": (calendar, 5.0, 5.0),
    "alphabet": (alphabet, 3.0, 4.0),
    "echo": (echo, 7.0, 16.0),
    "spelling": (spelling, 7.0, 15.0),
    "first_letter": (first_letter, 1.5, 5.0),
    "capital": (capital, 3.0, 3.0),
    "opposite": (opposite, 3.0, 2.5),
    "animal": (animal, 1.2, 1.0),
    "colour": (colour, 1.2, 1.0),
    "json_object": (json_object, 4.5, 7.0),
    "name_not_told": (name_not_told, 0.5, 0.5),
    "unknown": (unknown, 6.0, 5.0),
}
