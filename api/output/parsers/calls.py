"""How families of models write tool calls, one grammar each, and the tags that may stand around reasoning."""

import re

from .block import (
    MAX_NAME,
    PYTHON,
    SPACE,
    Block,
    Broken,
    Reads,
    arguments,
    call_object,
    closing,
    skip_space,
    until,
    value,
)
from .lexer import Grammar

_NAME_CHAR = re.compile(r"[A-Za-z0-9_.:/-]")


def _hermes(tag: str, block: Block) -> Reads[str]:
    """`<tool_call>{"name": …, "arguments": {…}}</tool_call>`"""
    yield from call_object(block, (yield from skip_space()))
    yield from closing("</tool_call>")
    return ""


def _llama3_json(tag: str, block: Block) -> Reads[str]:
    """`{"name": …, "parameters": {…}}` at the start or after `<|python_tag|>`, several with `;` between them."""
    char = tag if tag == "{" else (yield from skip_space())
    yield from call_object(block, char, needs_arguments=True)
    while (char := (yield from skip_space())) == ";":
        yield from call_object(block, (yield from skip_space()), needs_arguments=True)
    return char


def _mistral(tag: str, block: Block) -> Reads[str]:
    """`[TOOL_CALLS][{"name": …, "arguments": {…}}, …]`, or from 2025 on `[TOOL_CALLS]name[ARGS]{…}` for each call."""
    char = yield from skip_space()
    if char == "[":
        while char != "]":
            yield from call_object(block, (yield from skip_space()))
            char = yield from skip_space()
            if char not in ",]":
                raise Broken
        return ""
    name = ""
    while _NAME_CHAR.fullmatch(char) and len(name) < MAX_NAME:
        name += char
        char = yield
    if char == "[":
        mark = char + (yield from until("]", MAX_NAME)) + "]"
        if mark == "[CALL_ID]":
            mark = "[" + (yield from until("]", MAX_NAME)).rpartition("[")[2] + "]"
        if mark != "[ARGS]":
            raise Broken
        char = yield from skip_space()
    if char != "{":
        raise Broken
    block.start(name)
    yield from arguments(block, char)
    return ""


_DEEPSEEK_CALLS = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
_DEEPSEEK_CALL, _DEEPSEEK_SEP, _DEEPSEEK_END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
_FENCE = "```json\n"


def _deepseek(tag: str, block: Block) -> Reads[str]:
    """V3 and R1: `<｜tool▁call▁begin｜>function<｜tool▁sep｜>name`, a line end, the arguments in a fence,
    `<｜tool▁call▁end｜>`; from V3.1 on `<｜tool▁call▁begin｜>name<｜tool▁sep｜>{…}<｜tool▁call▁end｜>`. A pair of tags
    that says nothing stands around all of them."""
    if tag in _DEEPSEEK_CALLS:
        block.settle()
        return ""
    name = (yield from until(_DEEPSEEK_SEP, MAX_NAME)).strip()
    char = yield from skip_space()
    if char != "{":
        if name != "function":
            raise Broken
        name = (char + (yield from until("\n", MAX_NAME))).strip()
        if (yield from until("\n", len(_FENCE))) + "\n" != _FENCE:
            raise Broken
        char = yield from skip_space()
    if char != "{":
        raise Broken
    block.start(name)
    yield from arguments(block, char)
    yield from closing(_DEEPSEEK_END)
    return ""


def _pythonic(tag: str, block: Block) -> Reads[str]:
    """`[name(key=value, …), …]` at the start or after `<|python_start|>`; values as Python writes them."""
    char = tag if tag == "[" else (yield from skip_space())
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
    if tag != "[":
        yield from closing("<|python_end|>")
    return ""


def _identifier(char: str) -> "Reads[tuple[str, str]]":
    """A name and the first character after it that is no space."""
    name = ""
    while _NAME_CHAR.fullmatch(char):
        name += char
        if len(name) > MAX_NAME:
            raise Broken
        char = yield
    if not name:
        raise Broken
    return name, (char if char not in SPACE else (yield from skip_space()))


def _no_calls(tag: str, block: Block) -> Reads[str]:
    yield from ()
    raise AssertionError(f"{tag} begins nothing")


NO_CALLS = Grammar(_no_calls)
HERMES = Grammar(_hermes, tags=("<tool_call>",), marks=("</tool_call>",))
LLAMA3_JSON = Grammar(_llama3_json, leads=("{",), tags=("<|python_tag|>",))
MISTRAL = Grammar(_mistral, tags=("[TOOL_CALLS]",), marks=("[ARGS]", "[CALL_ID]"))
DEEPSEEK = Grammar(_deepseek, tags=(*_DEEPSEEK_CALLS, _DEEPSEEK_CALL), marks=(_DEEPSEEK_SEP, _DEEPSEEK_END))
PYTHONIC = Grammar(_pythonic, leads=("[",), tags=("<|python_start|>",), marks=("<|python_end|>",))


def thinking(opening: str, ending: str, calls: Grammar) -> Grammar:
    """Reasoning between two tags before the answer; the first may be the prompt's end. In the answer, `calls`."""

    def read(tag: str, block: Block) -> Reads[str]:
        if tag not in (opening, ending):
            return calls.read(tag, block)
        block.kind = "reasoning" if tag == opening else "text"
        return _nothing()

    def reasons(prompt: str) -> bool:
        return prompt.rstrip().endswith(opening)  # further back it may be what a person wrote

    return Grammar(read, (opening, *calls.leads), calls.tags, (ending,), calls.marks, reasons)


def _nothing() -> Reads[str]:
    yield from ()
    return ""
