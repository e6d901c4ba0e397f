"""Writes a constraint as a Lark grammar for llguidance: reasoning, then the answer. Checks the limits of client input.

Special tokens are written as ids, because they have no text. A tag that is not a special token of this vocabulary is
plain text.
"""

import json
import re
from collections.abc import Collection, Iterator, Sequence

from msgspec.structs import replace

from ...errors import RequestError
from ...ipc.messages import MAX_GRAMMAR_BYTES, Constraint, Source
from .json_schema import tidy
from .thinking_budget import opens_reasoning
from .tokenizer import Tokenizer

MAX_LEVELS = 64  # of nesting in a schema
MAX_KEYS = 1000  # of one object in a schema; the library needs seconds for more
MAX_ITEMS = 20_000  # of one list in a schema, or choices
MAX_REFERENCES = 1000  # $refs in any text, or rules; the library follows them recursively

# One space, or a newline and its indent: enough for every usual style, and a weak model cannot write spaces for ever.
_SPACES = {"whitespace_pattern": r"\n {0,16}| "}
_SPACE_OPTIONS = ("whitespace_flexible", "whitespace_pattern")
_GBNF = re.compile(r"^[ \t]*[\w-]+[ \t]*::=", re.MULTILINE)
_JSON = "%json "  # before a schema in Lark, which ends with the line
_WHAT = {
    "json_schema": "The JSON schema",
    "json_object": "json_object",
    "regex": "The regular expression",
    "choice": "The list of choices",
    "lark": "The grammar",
}


def what_it_is(constraint: Constraint, source: Source | None = None) -> str:
    """The subject of an error message. `source`: of the schema at fault, if the rules are our own."""
    if are_own_rules(constraint):
        if source is None:
            return "The format of the tools' calls"
        tool = f" (of {source.tool[:80]!r})" if source.tool else ""
        return f"{_WHAT['json_schema']} in {source.field}{tool}"
    return _WHAT[constraint.kind] + (f" in {constraint.sources[0].field}" if constraint.sources else "")


def are_own_rules(constraint: Constraint) -> bool:
    """Whether its text is rules of ours that contain a client's schemas."""
    return constraint.kind == "lark" and bool(constraint.lark_marks)


def refusal(constraint: Constraint, why: str, source: Source | None = None) -> RequestError:
    """An error about the constraint. `why`: the rest of the sentence after the subject."""
    if source is None and constraint.sources and not are_own_rules(constraint):
        source = constraint.sources[0]
    param = "" if source is None else source.field
    return RequestError("invalid_request", f"{what_it_is(constraint, source)} {why}.", param=param)


def complaint(constraint: Constraint, error: str, source: Source | None = None) -> RequestError:
    """The library's error message as one sentence for the client."""
    reason = next((line for line in error.splitlines() if line.startswith("error: ")), error.partition("\n")[0])
    reason = re.sub(r"^(at )?\d+\(\d+\): |^error: |failed to compile JSON schema: ", "", reason.strip())
    reason = re.sub(r"failed to compile JSON schema: |\. Enable '.*$", "", reason).rstrip(". ")
    return refusal(constraint, f"cannot be enforced: {reason[:300]}", source)


def write_grammar(constraint: Constraint, prompt_tail: str, tokenizer: Tokenizer) -> str:
    """The grammar of a whole output. Raises RequestError if the constraint exceeds a limit or cannot be parsed."""
    if len(constraint.text.encode("utf-8", "replace")) > MAX_GRAMMAR_BYTES:
        raise refusal(constraint, f"is larger than {MAX_GRAMMAR_BYTES} bytes")
    if constraint.text.count('"$ref"') > MAX_REFERENCES:
        constraint = with_replaced(constraint, range(len(constraint.sources)))
    if constraint.text.count('"$ref"') > MAX_REFERENCES:
        raise refusal(constraint, f"has more than {MAX_REFERENCES} references")
    lines, first = _reasoning(constraint, prompt_tail, tokenizer)
    if constraint.kind == "lark":
        return _around(constraint, lines, first, _rules(constraint, tokenizer))
    first += [_tag(mark, tokenizer) for mark in constraint.lark_marks]
    return "\n".join([f"start: {' '.join([*first, 'answer'])}", *lines, f"answer: {_answer(constraint)}"])


# ── the answer ───────────────────────────────────────────────────────────────────────────────────────────────────────


def _answer(constraint: Constraint) -> str:
    try:
        return _answer_rule(constraint)
    except ValueError:
        raise refusal(constraint, "is not valid JSON") from None


def _answer_rule(constraint: Constraint) -> str:
    match constraint.kind:
        case "json_object":
            return _json_rule({"type": "object"})
        case "json_schema":
            schema = _parse(constraint, constraint.text)
            if not isinstance(schema, dict | bool):
                raise refusal(constraint, "must be an object")
            return _json_rule(schema)
        case "choice":
            choices = _parse(constraint, constraint.text)
            if not isinstance(choices, list) or not choices or not all(isinstance(one, str) for one in choices):
                raise refusal(constraint, "must be a non-empty list of strings")
            # A terminal takes a third of the work of a rule.
            return "CHOICE\nCHOICE: " + " | ".join(_text(one) for one in choices)
        case _:
            assert constraint.kind == "regex", constraint.kind
            from llguidance import regex_to_lark

            if not constraint.text:
                raise refusal(constraint, "must not be empty")
            pattern = constraint.text.replace("\n", r"\n").replace("\0", r"\x00")  # a rule of Lark is one line
            return f"/{regex_to_lark(pattern, 'd')}/"  # \d is 0 to 9, as in a JSON schema's patterns


def _json_rule(schema: "dict[str, object] | bool") -> str:
    """A schema as the right side of a rule. Of its options for the library, only those for whitespace are kept."""
    if isinstance(schema, dict):
        own = schema.get("x-guidance")
        chosen = {name: own[name] for name in _SPACE_OPTIONS if name in own} if isinstance(own, dict) else {}
        schema = {**tidy(schema), "x-guidance": chosen or _SPACES}
    return _JSON + json.dumps(schema)


def _parse(constraint: Constraint, text: str, source: Source | None = None) -> object:
    """Decodes JSON. Raises RequestError if it exceeds a limit, ValueError if it is not JSON."""
    try:
        value = json.loads(text)
    except RecursionError:
        raise refusal(constraint, f"is nested deeper than {MAX_LEVELS} levels", source) from None
    for inner, level in _walk(value):
        if level > MAX_LEVELS:
            raise refusal(constraint, f"is nested deeper than {MAX_LEVELS} levels", source)
        if isinstance(inner, dict) and len(inner) > MAX_KEYS:
            raise refusal(constraint, f"has an object with more than {MAX_KEYS} keys", source)
        if isinstance(inner, list) and len(inner) > MAX_ITEMS:
            raise refusal(constraint, f"has a list of more than {MAX_ITEMS} values", source)
    return value


def _walk(value: object) -> Iterator[tuple[object, int]]:
    """Every object and list in `value`, and its nesting level."""
    waiting = [(value, 1)]
    while waiting:
        value, level = waiting.pop()
        if isinstance(value, dict | list):
            yield value, level
            waiting += [(inner, level + 1) for inner in (value.values() if isinstance(value, dict) else value)]


def _rules(constraint: Constraint, tokenizer: Tokenizer) -> str:
    """The rules of a constraint in Lark, or in llama.cpp's GBNF, and those of its marks."""
    if constraint.text.count("\n") > MAX_REFERENCES:
        raise refusal(constraint, f"has more than {MAX_REFERENCES} lines")
    text = constraint.text
    if _GBNF.search(text):
        from llguidance.gbnf_to_lark import any_to_lark

        try:
            text = str(any_to_lark(text))
        except Exception as error:  # the converter raises errors of any type
            raise complaint(constraint, str(error)) from None
    sources = iter(constraint.sources if are_own_rules(constraint) else ())
    lines = text.split("\n")
    text = "\n".join(_bounded_line(constraint, line, sources) if _JSON in line else line for line in lines)
    marks = [f"mark{i}: {_tag(mark, tokenizer)}" for i, mark in enumerate(constraint.lark_marks)]
    return "\n".join([text, *marks, ""])


def _bounded_line(constraint: Constraint, line: str, sources: Iterator[Source]) -> str:
    """A line of Lark that ends with a schema, checked against the limits of schemas."""
    before, _, schema = line.partition(_JSON)
    source = next(sources, None)
    if not schema.startswith("{"):
        return line
    try:
        value = _parse(constraint, schema, source)
    except ValueError:
        return line  # the schema goes on in the next line, or is followed by something
    except RequestError:
        if source is None or not source.instead:
            raise
        return _bounded_line(constraint, f"{before}{_JSON}{source.instead}", iter(()))
    return before + _json_rule(value) if isinstance(value, dict) else line


def alone(constraint: Constraint) -> list[str]:
    """A grammar for each of the schemas in rules of our own. Raises RequestError if one exceeds a limit."""
    lines = [line for line in constraint.text.split("\n") if _JSON in line]
    sources = iter(constraint.sources)
    bounded = [_bounded_line(constraint, line, sources) for line in lines[: len(constraint.sources)]]
    return [f"start: {_JSON}{line.partition(_JSON)[2]}" for line in bounded]


def with_replaced(constraint: Constraint, places: Collection[int]) -> Constraint:
    """The constraint with the schemas at these places replaced by their sources' `instead`, where there is one."""
    lines, place = constraint.text.split("\n"), -1
    for i, line in enumerate(lines):
        place += _JSON in line
        is_meant = _JSON in line and place in places and place < len(constraint.sources)
        if is_meant and (instead := constraint.sources[place].instead):
            lines[i] = line.partition(_JSON)[0] + _JSON + instead
    return replace(constraint, text="\n".join(lines))


def _around(constraint: Constraint, lines: Sequence[str], first: Sequence[str], rules: str) -> str:
    """The grammar `rules`, which has its own start rule, after the reasoning in `first`."""
    if not first:
        return rules
    outer = "\n".join([f"start: {' '.join(first)} @answer", *lines, ""])
    return json.dumps(
        {"grammars": [{"name": "output", "lark_grammar": outer}, {"name": "answer", "lark_grammar": rules}]}
    )


# ── reasoning ────────────────────────────────────────────────────────────────────────────────────────────


def _reasoning(constraint: Constraint, prompt_tail: str, tokenizer: Tokenizer) -> tuple[list[str], list[str]]:
    """Rules, and what the start rule begins with: reasoning that is optional, that the prompt has begun, or none."""
    starts, ends = constraint.reasoning_starts, constraint.reasoning_ends
    if not ends or prompt_tail.rstrip().endswith(ends):
        return [], []
    lines = [
        "THOUGHTS: /(.|\\n)*/",
        "SPACES: /[ \\n]{1,2}/",
        "thought: " + " | ".join(f"thought{i}" for i in range(len(ends))),
    ]
    for i, end in enumerate(ends):
        pieces = _pieces(end, tokenizer)
        if isinstance(pieces[0], str):  # the reasoning ends where this text first appears
            lines.append(f"thoughts{i}[suffix={_text(pieces[0])}]: THOUGHTS")
            lines.append(f"thought{i}: " + " ".join([f"thoughts{i}", *map(_piece, pieces[1:])]))
        else:
            lines.append(f"thought{i}: THOUGHTS {_tag(end, tokenizer)}")
    if opens_reasoning(prompt_tail, starts):
        return lines, ["thought SPACES?"]
    opened = " | ".join(_tag(start, tokenizer) for start in starts)
    return (lines, [f"(({opened}) thought SPACES?)?"]) if opened else (lines, ["thought SPACES?"])


def _tag(text: str, tokenizer: Tokenizer) -> str:
    return " ".join(map(_piece, _pieces(text, tokenizer)))


def _pieces(text: str, tokenizer: Tokenizer) -> list[str | int]:
    """A tag split into texts and ids of special tokens."""
    return list(tokenizer.split_specials(text)) or [""]


def _piece(piece: str | int) -> str:
    return f"<[{piece}]>" if isinstance(piece, int) else _text(piece)


def _text(text: str) -> str:
    """A Lark string literal, which is written as in JSON."""
    return json.dumps(text)
