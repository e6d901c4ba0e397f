"""Llama 4 and others: `[name(key=value, …), …]` at the start or after `<|python_start|>`, with values as in Python."""

import json

from ..block import PYTHON, SPACE, Block, Broken, Reads, call_name, closing, skip_space, value
from ..family import Family
from ..lexer import Grammar
from ..spelling import MAX_ARGUMENTS, CallRules, Schema, Tools, literal, named_properties, one_of, repeat, rule


def _read_calls(block: Block, char: str) -> Reads[None]:
    """A list of calls that begins with `char`."""
    if char != "[":
        raise Broken
    while char != "]":
        block.quiet = False
        name, char = yield from _identifier((yield from skip_space()))
        if char != "(":
            raise Broken
        before = "{"
        char = yield from skip_space()
        while char != ")":
            key, char = yield from _identifier(char)
            if char != "=":
                raise Broken
            if before == "{":
                block.start(name)
            block.argue(f'{before}"{key}": ')
            before = ", "
            char = yield from value((yield from skip_space()), block.argue, PYTHON)
            if char in SPACE:  # or not read yet
                char = yield from skip_space()
            if char == ",":
                char = yield from skip_space()
            elif char != ")":
                raise Broken
        if before == "{":
            block.start(name)
            block.argue("{")
        block.argue("}")
        block.settle()
        char = yield from skip_space()
        if char not in ",]":
            raise Broken


def _identifier(char: str) -> Reads[tuple[str, str]]:
    """A name, and the first character after it that is not a space."""
    name, char = yield from call_name(char)
    if not name:
        raise Broken
    return name, (char if char not in SPACE else (yield from skip_space()))


def _spell_list(tools: Tools, several: bool) -> list[str]:
    """The rule `list`. Values are written as JSON, which the reader takes as well."""
    rules = [
        rule("list", literal("["), repeat("call", ", ", several), literal("]")),
        *one_of("call", ["name", literal("("), "first", literal(")")], tools),
    ]
    for i, (name, schema) in enumerate(tools):
        rules += _keywords(i, name, schema)
    return rules


def _keywords(tool: int, name: str, schema: Schema) -> list[str]:
    """`key=value, …` in the order of the properties: `first` until one was written, `next` from then on."""
    properties = named_properties(name, schema)
    if properties is None:
        return _any_keywords(tool)
    definitions: Schema = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    rules = [rule(f"first{tool}", f"first{tool}_0")]
    for i, (key, inner, is_required) in enumerate(properties):
        value, first, following = f"value{tool}_{i}", f"first{tool}_{i}", f"next{tool}_{i}"
        first_after, next_after = f"first{tool}_{i + 1}", f"next{tool}_{i + 1}"
        inner = {**inner, **definitions} if isinstance(inner, dict) else inner  # it may refer to them
        rules.append(rule(value, literal(f"{key}="), f"schema{tool}_{i}"))
        rules.append(rule(f"schema{tool}_{i}", "%json " + json.dumps(inner)))
        rules.append(rule(first, value, next_after, *([] if is_required else ["|", first_after])))
        rules.append(rule(following, literal(", "), value, next_after, *([] if is_required else ["|", next_after])))
    return [*rules, *(rule(f"{state}{tool}_{len(properties)}", literal("")) for state in ("first", "next"))]


def _any_keywords(tool: int) -> list[str]:
    """For a tool whose schema allows any object."""
    pair = f"pair{tool}"
    return [
        rule(f"first{tool}", f"({pair} ({literal(', ')} {pair}){{0,{MAX_ARGUMENTS - 1}}})?"),
        rule(pair, r"/[A-Za-z_][A-Za-z0-9_]{0,63}/", literal("="), f"schema{tool}_0"),
        rule(f"schema{tool}_0", "%json {}"),
    ]


def tagged_family(start: str, end: str, *, leads: bool = False) -> Family:
    """A family that writes calls in Python between two tags; with `leads` also without, at the start of an answer."""

    def read(tag: str, block: Block) -> Reads[str]:
        char = tag if tag == "[" else (yield from skip_space())
        yield from _read_calls(block, char)
        if tag != "[":
            yield from closing(end)
        return ""

    def spell(tools: Tools, several: bool) -> CallRules:
        calls = rule("calls", "list | mark0 list mark1" if leads else "mark0 list mark1")
        return CallRules([calls, *_spell_list(tools, several)], (start, end))

    return Family(
        calls=Grammar(read, leads=("[",) if leads else (), tags=(start,), marks=(end,)),
        spell=spell,
        shows_calls=lambda template: start in template,
    )


_LLAMA4 = tagged_family("<|python_start|>", "<|python_end|>", leads=True)
PYTHONIC = _LLAMA4._replace(
    shows_calls=lambda template: "[func_name1(" in template or _LLAMA4.shows_calls(template),
)
