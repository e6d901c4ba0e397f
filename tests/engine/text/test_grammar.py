"""Token masks of constraints: every output that is sampled at random under them keeps to its constraint."""

import json
import random
import re
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from drawing import allowed, draw, grammars_of
from msgspec.structs import replace
from waiting import cpu_deadline

from pagewire.engine.text.grammar import Grammars, load_grammars
from pagewire.engine.text.tokenizer import Tokenizer
from pagewire.errors import RequestError
from pagewire.ipc.messages import Constraint, ids_to_bytes

from .tokenizers_for_tests import make, trained, write_folder

EOS = "<|im_end|>"
THINK: dict[str, Any] = {"reasoning_starts": ("<think>",), "reasoning_ends": ("</think>",)}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return make("byte_level", eos_token=EOS)


@pytest.fixture(scope="module")
def grammars(tokenizer: Tokenizer) -> Grammars:
    return grammars_of(tokenizer)


def with_specials(*texts: str) -> Tokenizer:
    backend = tokenizers.Tokenizer.from_str(trained("byte_level"))
    backend.add_special_tokens([tokenizers.AddedToken(text, special=True) for text in texts])
    return Tokenizer(backend, {"eos_token": EOS})


def texts(grammars: Grammars, tokenizer: Tokenizer, constraint: Constraint, num: int = 20, tail: str = "") -> list[str]:
    outputs = [draw(grammars.compile(constraint, tail), tokenizer, seed) for seed in range(num)]
    return [tokenizer.decode(ids, False) for ids in outputs]


# ── kinds ────────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback"])
def test_every_kind_of_constraint_on_every_vocabulary_that_spells_bytes(kind: str) -> None:
    tokenizer = make(kind, eos_token=EOS)
    grammars = grammars_of(tokenizer)
    choices = ["red", "blue 🙂", 'a "b"\\', "rot\n"]
    found = texts(grammars, tokenizer, Constraint("choice", json.dumps(choices)), 40)
    assert set(found) == set(choices)
    assert set(texts(grammars, tokenizer, Constraint("choice", '["", "a"]'))) == {"", "a"}
    for text in texts(grammars, tokenizer, Constraint("regex", r"[a-c]{2,5}/\d\n?")):
        assert re.fullmatch(r"[a-c]{2,5}/[0-9]\n?", text)
    for text in texts(grammars, tokenizer, Constraint("json_object")):
        assert isinstance(json.loads(text), dict)
    for text in texts(grammars, tokenizer, Constraint("lark", 'start: "(" start ")" | "x"')):
        assert text.count("(") == text.count(")") and text.strip("()") == "x"
    assert set(texts(grammars, tokenizer, Constraint("lark", 'root ::= "yes" | "no"'))) == {"yes", "no"}


def test_eos_is_allowed_only_where_the_grammar_may_end(grammars: Grammars, tokenizer: Tokenizer) -> None:
    matcher = grammars.compile(Constraint("regex", "ab?"), "")
    (a,), (b,) = tokenizer.encode("a", False), tokenizer.encode("b", False)
    assert allowed(matcher, tokenizer) == [a]
    matcher.accept([a])
    assert allowed(matcher, tokenizer) == sorted([b, tokenizer.eos_token_id or 0]) and not matcher.is_ended
    matcher.accept([b])
    assert matcher.is_ended and allowed(matcher, tokenizer) == [tokenizer.eos_token_id]
    matcher.accept([tokenizer.eos_token_id, a])  # sampled after the end, and ignored
    assert matcher.is_ended


def test_no_special_token_is_allowed_within_a_text(grammars: Grammars, tokenizer: Tokenizer) -> None:
    matcher = grammars.compile(Constraint("regex", "(.|\n)*"), "")
    assert set(allowed(matcher, tokenizer) or ()) & tokenizer.special_ids == {tokenizer.eos_token_id}
    spelled = texts(grammars, tokenizer, Constraint("choice", '["<|im_start|>x"]'), 3)
    ids = draw(grammars.compile(Constraint("choice", '["<|im_start|>x"]'), ""), tokenizer, 1)
    assert spelled == ["<|im_start|>x"] * 3 and tokenizer.special_ids.isdisjoint(ids)


def test_ids_accepted_at_once_or_one_by_one_give_the_same_mask(grammars: Grammars, tokenizer: Tokenizer) -> None:
    constraint = Constraint("json_schema", json.dumps({"type": "array", "items": {"enum": [1, 22]}, "maxItems": 9}))
    ids = draw(grammars.compile(constraint, ""), tokenizer, 3)
    whole, pieces = grammars.compile(constraint, ""), grammars.compile(constraint, "")
    whole.accept(ids[:-1])
    for id in ids[:-1]:
        pieces.accept([id])
    assert allowed(whole, tokenizer) == allowed(pieces, tokenizer)


def test_whitespace_is_bounded(grammars: Grammars, tokenizer: Tokenizer) -> None:
    (space,) = tokenizer.encode(" ", False)
    for options in ({}, {"x-guidance": {"lenient": True}}):
        schema = {"type": "array", "items": {"type": "null"}, **options}
        matcher = grammars.compile(Constraint("json_schema", json.dumps(schema)), "")
        matcher.accept(tokenizer.encode("[", False))
        matcher.accept([space])
        assert space not in (allowed(matcher, tokenizer) or ())
    compact = {"type": "array", "items": {"type": "null"}, "x-guidance": {"whitespace_flexible": False}}
    matcher = grammars.compile(Constraint("json_schema", json.dumps(compact)), "")
    matcher.accept(tokenizer.encode("[", False))
    assert space not in (allowed(matcher, tokenizer) or ())
    with pytest.raises(RequestError, match="nimplemented"):  # a client cannot make the library ignore keywords
        grammars.compile(Constraint("json_schema", '{"not": {}, "x-guidance": {"lenient": true}}'), "")


def test_keywords_that_assert_nothing_are_accepted(grammars: Grammars, tokenizer: Tokenizer) -> None:
    one = {"type": "string", "format": "password", "maxLength": 3, "deprecated": True, "nullable": False}
    schema = {
        "type": "object",
        "properties": {
            "format": one,
            "uniqueItems": {"type": "array", "items": one, "uniqueItems": False, "maxItems": 1},
        },
        "required": ["format", "uniqueItems"],
        "additionalProperties": False,
        "title": "T",
        "default": {"format": "none"},
    }
    for text in texts(grammars, tokenizer, Constraint("json_schema", json.dumps(schema)), 5):
        found = json.loads(text)
        assert isinstance(found["format"], str) and isinstance(found["uniqueItems"], list)


# ── reasoning ────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("special", [True, False])
@pytest.mark.parametrize("tail", ["<|im_start|>assistant\n", "assistant\n<think>\n", "<think>\n\n</think>\n\n"])
def test_the_grammar_starts_after_the_reasoning(special: bool, tail: str) -> None:
    tokenizer = with_specials("<think>", "</think>") if special else with_specials()
    constraint = Constraint("choice", '["yes", "no"]', **THINK)
    matcher = grammars_of(tokenizer).compile(constraint, tail)
    begun, over = tail.endswith("<think>\n"), tail.endswith("</think>\n\n")
    first = allowed(matcher, tokenizer) or []
    starts = [id for id in first if b"<think>".startswith(tokenizer.token_bytes(id) or b"?")]
    assert len(first) > 100 if begun else bool(starts) is not over
    if over:
        assert texts(grammars_of(tokenizer), tokenizer, constraint, 6, tail)
    else:
        matcher.accept(tokenizer.encode("so <that> is <" if begun else "<think>so <that> is <", False))
        assert len(allowed(matcher, tokenizer) or ()) > 100, "every token is allowed in the reasoning"
        matcher.accept(tokenizer.encode("</think>\n\n", False))
    answers = {tokenizer.decode(draw(matcher, tokenizer, 5), False)}
    assert answers < {"yes", "no"}


def test_a_model_may_answer_without_reasoning(tokenizer: Tokenizer, grammars: Grammars) -> None:
    for constraint in (
        Constraint("lark", 'start: "yes" | "no"', **THINK),
        Constraint("json_schema", '{"enum": ["yes"]}', **THINK),
        Constraint("regex", "yes", **THINK),
    ):
        matcher = grammars.compile(constraint, "assistant\n")
        answer = '"yes"' if constraint.kind == "json_schema" else "yes"
        matcher.accept(tokenizer.encode(answer, False))
        assert matcher.is_ended
        matcher = grammars.compile(constraint, "assistant\n")
        matcher.accept(tokenizer.encode(f"<think>no</think>{answer}", False))
        assert matcher.is_ended
        matcher = grammars.compile(constraint, "assistant\n")
        with pytest.raises(RequestError, match="could not be followed"):
            matcher.accept(tokenizer.encode("maybe", False))


HARMONY_TAGS = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|constrain|>")
HARMONY: dict[str, Any] = {
    "reasoning_starts": ("<|channel|>analysis<|message|>",),
    "reasoning_ends": ("<|end|><|start|>assistant",),
}


def test_the_grammar_applies_to_the_final_message_of_harmony() -> None:
    tokenizer = with_specials(*HARMONY_TAGS)
    grammars = grammars_of(tokenizer)
    constraint = Constraint("json_schema", '{"enum": [7]}', lark_marks=("<|channel|>final<|message|>",), **HARMONY)
    answer = "<|channel|>final<|message|>7"
    for output in (answer, "<|channel|>analysis<|message|>hm\n<|end|><|start|>assistant" + answer):
        matcher = grammars.compile(constraint, "<|start|>assistant")
        matcher.accept(tokenizer.encode(output, False))
        assert matcher.is_ended
    matcher = grammars.compile(constraint, "<|start|>assistant")
    assert allowed(matcher, tokenizer) == tokenizer.encode("<|channel|>", False)


# ── a thinking budget ────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("special", [True, False])
@pytest.mark.parametrize("kind", ["none", "choice"])
@pytest.mark.parametrize("budget", [0, 1, 17])
def test_the_end_of_the_reasoning_is_forced(special: bool, kind: str, budget: int) -> None:
    tokenizer = with_specials("<think>", "</think>") if special else with_specials()
    constraint = Constraint(kind, '["yes"]' if kind == "choice" else "", thinking_budget=budget, **THINK)  # type: ignore[arg-type]
    for tail in ("<think>\n", "assistant\n"):
        matcher = grammars_of(tokenizer).compile(constraint, tail)
        rng = random.Random(budget)
        out = [] if tail.startswith("<") else tokenizer.encode("<think>", False)
        matcher.accept(out)
        for _ in range(80):
            allowed_ids = allowed(matcher, tokenizer)
            if matcher.is_ended:
                break
            ordinary = [id for id in range(tokenizer.vocab_size) if id not in tokenizer.special_ids]
            out.append(rng.choice(ordinary if allowed_ids is None else allowed_ids))
            matcher.accept(out[-1:])
        text = tokenizer.decode(out, False)
        thoughts, tag, rest = text.partition("</think>")
        assert tag and rest.strip() == "yes" if kind == "choice" else tag
        num = len(tokenizer.encode(thoughts.removeprefix("<think>"), False))
        assert num <= 4 * budget + 4, "encoded again, the text has at most a few more tokens"
        spent = out.index(tokenizer.encode("</think>", False)[0]) if special else budget
        assert spent - (0 if tail.startswith("<") else 1) <= budget + 4, "an incomplete character is finished first"


def test_an_answer_spends_no_thinking_budget(tokenizer: Tokenizer, grammars: Grammars) -> None:
    matcher = grammars.compile(Constraint(thinking_budget=2, **THINK), "assistant\n")
    matcher.accept(tokenizer.encode("Hello <think> I am no reasoning", False))
    assert allowed(matcher, tokenizer) is None
    matcher = grammars.compile(Constraint(thinking_budget=2, **THINK), "assistant\n")
    matcher.accept(tokenizer.encode("<think>a</think>an answer that is long", False))
    assert allowed(matcher, tokenizer) is None


# ── bad words ────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_bad_words_are_never_completed(tokenizer: Tokenizer, grammars: Grammars) -> None:
    (a,), (b,) = tokenizer.encode("a", False), tokenizer.encode("b", False)
    words = [[a, b], [b, b, a], [5], [a, a, a, a]]
    constraint = Constraint(bad_words=tuple(map(ids_to_bytes, words)))
    rng = random.Random(0)
    matcher = grammars.compile(constraint, "")
    out: list[int] = []
    for _ in range(500):
        allowed_ids = set(allowed(matcher, tokenizer) or range(tokenizer.vocab_size))
        banned = {word[-1] for word in words if out[len(out) - len(word) + 1 :] == word[:-1] or len(word) == 1}
        assert allowed_ids.isdisjoint(banned) and len(allowed_ids) >= tokenizer.vocab_size - len(banned)
        out.append(rng.choice([id for id in (a, b, 5, 9) if id in allowed_ids]))
        matcher.accept(out[-1:])
    assert {a, b, 9} == set(out)
    quiet = grammars.compile(Constraint(bad_words=(ids_to_bytes([a, b]),)), "")
    assert allowed(quiet, tokenizer) is None, "nothing is banned yet"


def test_bad_words_are_removed_from_the_masks_of_a_grammar(tokenizer: Tokenizer, grammars: Grammars) -> None:
    (a,), (b,) = tokenizer.encode("a", False), tokenizer.encode("b", False)
    matcher = grammars.compile(Constraint("regex", "[ab]", bad_words=(ids_to_bytes([a]),)), "")
    assert allowed(matcher, tokenizer) == [b]
    matcher = grammars.compile(Constraint("regex", "a", bad_words=(ids_to_bytes([a]),)), "")
    with pytest.raises(RequestError, match="bad_words leaves no token"):
        allowed(matcher, tokenizer)


@pytest.mark.parametrize("word", [b"", b"abc", ids_to_bytes([-1]), ids_to_bytes([10**6])])
def test_bad_words_that_are_not_token_ids_are_refused(word: bytes, grammars: Grammars) -> None:
    with pytest.raises(RequestError, match="bad_words"):
        grammars.compile(Constraint(bad_words=(word,)), "")


# ── refused or heavy constraints ──────────────────────────────────────────────────────────────────────────────────────


def nested(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "null"}
    for _ in range(levels):
        schema = {"type": "array", "items": schema}
    return schema


def schema(value: object) -> Constraint:
    return Constraint("json_schema", json.dumps(value))


def lark(text: str) -> Constraint:
    return Constraint("lark", text)


HOSTILE: dict[str, tuple[Constraint, str]] = {
    "no JSON": (Constraint("json_schema", "{"), "valid JSON"),
    "no schema": (Constraint("json_schema", "[1]"), "must be an object"),
    "an unknown type": (schema({"type": "strng"}), "Invalid type: strng"),
    "a missing reference": (schema({"$ref": "#/$defs/x"}), "does not exist"),
    "a remote reference": (schema({"$ref": "http://127.0.0.1:1/x"}), "cannot be enforced"),
    "unknown keyword": (schema({"if": {"type": "string"}, "then": {"minLength": 2}}), "if"),
    "a format that is not enforced": (schema({"type": "string", "format": "uri-reference"}), "uri-reference"),
    "look-around": (schema({"type": "string", "pattern": "(?=a)b"}), "look-around"),
    "oneOf branches that overlap": (
        schema({"oneOf": [{"properties": {"a": {"type": "null"}}}, {"properties": {"b": {"type": "null"}}}]}),
        "oneOf constraints are not supported.$",
    ),
    "the schema false": (schema(False), "cannot be enforced"),
    "impossible": (schema({"type": "integer", "minimum": 3, "maximum": 2}), "cannot be enforced"),
    "a reference to itself": (schema({"$ref": "#"}), "allows no text"),
    "circular references": (
        schema({"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}),
        "allows no text",
    ),
    "deep": (schema(nested(200)), "nested deeper"),
    "deeper than Python": (Constraint("json_schema", '{"items":' * 20_000 + "{}" + "}" * 20_000), "nested deeper"),
    "many keys": (schema({"properties": {f"k{i}": {"type": "null"} for i in range(5000)}}), "more than 1000 keys"),
    "an enum of 10 MB": (schema({"enum": [f"value {i}" for i in range(700_000)]}), "larger than"),
    "many references": (schema({"anyOf": [{"$ref": "#/$defs/a"}] * 1001, "$defs": {"a": {}}}), "references"),
    "large multipleOf": (schema({"type": "integer", "multipleOf": 9_999_991, "minimum": 1, "maximum": 10**15}), "fuel"),
    "many unions": (
        schema(
            {"allOf": [{"anyOf": [{"properties": {f"k{j}{i}": {"const": i}}} for i in range(8)]} for j in range(8)]}
        ),
        "too large",
    ),
    "no regex": (Constraint("regex", "(("), "unclosed group"),
    "empty regex": (Constraint("regex", ""), "must not be empty"),
    "back-reference": (Constraint("regex", r"(a)\1"), "backreferences"),
    "30,000 parentheses": (Constraint("regex", "(" * 30_000 + ")" * 30_000), "cannot be enforced"),
    "no choice": (Constraint("choice", "[]"), "list of strings"),
    "choices that are not strings": (Constraint("choice", "[1]"), "list of strings"),
    "no lark": (lark("]]]"), "cannot be enforced"),
    "no start": (lark('a: "b"'), "no start"),
    "an unknown rule": (lark("start: foo"), "foo"),
    "a rule that is only itself": (lark("start: start"), "allows no text"),
    "a circular token": (lark("start: A\nA: B\nB: A"), "circular"),
    "20,000 parentheses": (lark("start: " + "(" * 20_000 + '"a"' + ")" * 20_000), "nested"),
    "a chain of rules": (
        lark("\n".join(["start: r0", *(f'r{i}: "a" r{i + 1}' for i in range(5000)), 'r5000: "b"'])),
        "more than 1000 lines",
    ),
    "many beginnings of schemas": (lark("start: " + "%json {" * 30_000), "cannot be enforced"),
    "much whitespace": (lark("\n" * 900 + " " * 200_000 + "start"), "cannot be enforced"),
    "an invalid schema within lark": (lark('start: %json {"type": "strng"}'), "Invalid type"),
    "a deep schema within lark": (lark(f"start: %json {json.dumps(nested(100))}"), "nested deeper"),
}
HEAVY: dict[str, Constraint] = {
    "left recursion": lark('start: start "a" | "a"'),
    "ambiguous": lark('start: s\ns: s s s | s s | "a" | ""'),
    "nested repetition in lark": lark('start: ((("a"{1000}){1000}){1000}){1000}'),
    "a regex that backtracks": Constraint("regex", "(((((((((a*)*)*)*)*)*)*)*)*)*b"),
    "a regex with many states": Constraint("regex", "(.*a.{30})|(.*b.{40})"),
    "nested repetition in a regex": Constraint("regex", "((a{1,1000}){1,1000}){1,1000}"),
    "long strings": schema({"type": "string", "minLength": 10**9}),
    "long lists": schema({"type": "array", "items": {"type": "null"}, "minItems": 10**9}),
    "a tree": schema({"properties": {"children": {"type": "array", "items": {"$ref": "#"}}}, "type": "object"}),
    "many words": schema({"enum": [f"word {i}" for i in range(15_000)]}),
    "many choices": Constraint("choice", json.dumps([f"word {i}" for i in range(15_000)])),
    "many keys": schema({"type": "object", "properties": {f"k{i}": {"type": "integer"} for i in range(1000)}}),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_constraint_that_cannot_be_enforced_gives_a_one_sentence_error(name: str, grammars: Grammars) -> None:
    constraint, words = HOSTILE[name]
    with cpu_deadline(2):
        with pytest.raises(RequestError, match=words):
            grammars.compile(replace(constraint, **THINK), "")
        with pytest.raises(RequestError, match=words) as caught:
            grammars.compile(constraint, "")
    message = str(caught.value)
    assert caught.value.kind == "invalid_request" and len(message) < 500 and "\n" not in message
    assert message.endswith(".") and "<non-verbose" not in message


@pytest.mark.parametrize("name", HEAVY)
def test_heavy_constraints_take_bounded_time(name: str, grammars: Grammars, tokenizer: Tokenizer) -> None:
    """Each is followed or fails, and each mask is computed in time."""
    with cpu_deadline(2):
        matcher = grammars.compile(HEAVY[name], "")
    rng = random.Random(0)
    try:
        with cpu_deadline(5):
            for _ in range(50):
                if matcher.is_ended:
                    break
                id = rng.choice(allowed(matcher, tokenizer) or [0])
                matcher.accept([id])
    except RequestError as error:
        assert "could not be followed" in str(error)


# ── tokenizers ───────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_vocabulary_that_does_not_spell_bytes_has_no_grammars() -> None:
    tokenizer = make("word_piece", eos_token=EOS)
    with pytest.raises(RequestError, match="do not spell texts byte by byte"):
        grammars_of(tokenizer).compile(Constraint("json_object"), "")
    grammars_of(tokenizer).compile(Constraint(bad_words=(ids_to_bytes([1]),)), "")


def test_grammars_are_loaded_from_the_folder_of_a_model(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"no tokenizer\.json"):
        load_grammars(tmp_path, 100, [0]).compile(Constraint("json_object"), "")
    write_folder(tmp_path)
    assert not load_grammars(tmp_path, 400, [2]).compile(Constraint("json_object"), "").is_ended
