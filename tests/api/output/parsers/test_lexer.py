"""Parsing of model output: the events do not depend on the chunks, calls are as written, and the rest is text."""

import json
import random
from functools import partial

import pytest
from counting import lines_of

from pagewire.api.output import parsers
from pagewire.api.output.parsers.events import CallArguments, CallStart, Event, Reasoning, Text, joined
from pagewire.api.output.parsers.family import NO_CALLS
from pagewire.api.output.parsers.lexer import MAX_HELD, Grammar, Lexer
from pagewire.api.output.parsers.registry import find_family, find_grammar

Found = list[str | tuple[str, str] | dict[str, str]]  # text, call (name, arguments), reasoning {"r": …}

ARGUMENTS = '{"a": "x\\"}</tool_call>", "b": [1, {"c": null}]}'
CALL = f'<tool_call>{{"name": "f", "arguments": {ARGUMENTS}}}</tool_call>'
HERMES_CASES: dict[str, tuple[str, Found]] = {
    "text": ("just words", ["just words"]),
    "empty": ("", []),
    "call": (CALL, [("f", ARGUMENTS)]),
    "text and call": (f"Sure. \n{CALL}", ["Sure.", ("f", ARGUMENTS)]),
    "two calls": (f"{CALL}\n{CALL}\n", [("f", ARGUMENTS), ("f", ARGUMENTS)]),
    "text after": (f"{CALL}\nDone.", [("f", ARGUMENTS), "\nDone."]),
    "spaces inside": ('<tool_call>\n { "name" : "f" , "arguments" : { } }\n </tool_call>', [("f", "{ }")]),
    "as written": (
        '<tool_call>{"name":"f","arguments":{"a" :1 ,\n"b":[true , -1.5e+3]}}</tool_call>',
        [("f", '{"a" :1 ,\n"b":[true , -1.5e+3]}')],
    ),
    "arguments first": ('<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call>', [("f", '{"a": 1}')]),
    "arguments as a string": ('<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', [("f", '{"a": 1}')]),
    "no arguments": ('<tool_call>{"name": "f"}</tool_call>', [("f", "{}")]),
    "null arguments": ('<tool_call>{"name": "f", "arguments": null}</tool_call>', [("f", "{}")]),
    "parameters": ('<tool_call>{"name": "f", "parameters": {"a": 1}}</tool_call>', [("f", '{"a": 1}')]),
    "other keys": (
        '<tool_call>{"id": 5, "x": {"name": "no"}, "name": "f", "arguments": {}, "type": "function"}</tool_call>',
        [("f", "{}")],
    ),
    "arguments twice": ('<tool_call>{"name": "f", "arguments": {}, "arguments": {"a": 1}}</tool_call>', [("f", "{}")]),
    "bare line end": ('<tool_call>{"name": "f", "arguments": {"a": "1\n2"}}</tool_call>', [("f", '{"a": "1\\n2"}')]),
    "a brace too many": ('<tool_call>{"name": "f", "arguments": {}}}</tool_call>.', [("f", "{}"), "."]),
    "never closed": (CALL.removesuffix("</tool_call>"), [("f", ARGUMENTS)]),
    "cut in the arguments": ('<tool_call>{"name": "f", "arguments": {"a": "b', [("f", '{"a": "b')]),
    "cut before the name": (' x <tool_call>{"na', [' x <tool_call>{"na']),
    "not an object": ("a <tool_call>hello</tool_call> b", ["a <tool_call>hello</tool_call> b"]),
    "no name": ('<tool_call>{"arguments": {}}</tool_call>', ['<tool_call>{"arguments": {}}</tool_call>']),
    "name is not a string": ('<tool_call>{"name": 5}</tool_call>', ['<tool_call>{"name": 5}</tool_call>']),
    "name with a space": ('<tool_call>{"name": "f g"}</tool_call>', ['<tool_call>{"name": "f g"}</tool_call>']),
    "arguments are a list": (
        '<tool_call>{"name": "f", "arguments": [1]}</tool_call>',
        ['<tool_call>{"name": "f", "arguments": [1]}</tool_call>'],
    ),
    "broken after the name": (
        '<tool_call>{"name": "f", oops}</tool_call>',
        ['<tool_call>{"name": "f", oops}</tool_call>'],
    ),
    "broken in the arguments": (
        '<tool_call>{"name": "f", "arguments": {"a": oops}}</tool_call>',
        [("f", '{"a": '), "oops}}</tool_call>"],
    ),
    "a call after a broken one": (f"<tool_call>hm {CALL}", ["<tool_call>hm", ("f", ARGUMENTS)]),
    "a call inside a broken one": (f'<tool_call>{{"name": {CALL}', ['<tool_call>{"name": ', ("f", ARGUMENTS)]),
    "almost a tag": ("a <tool_cal", ["a <tool_cal"]),
    "a < b": ("if a < b <tool> c", ["if a < b <tool> c"]),
    "spaces at the end": ("words \n", ["words \n"]),
    "many spaces": (" " * 5000 + CALL, [" " * 5000, ("f", ARGUMENTS)]),
    "escapes in the name": ('<tool_call>{"name": "\\u0066", "arguments": {}}</tool_call>', [("f", "{}")]),
}
LLAMA3_CASES: dict[str, tuple[str, Found]] = {
    "call": ('{"name": "f", "parameters": {"a": "1"}}', [("f", '{"a": "1"}')]),
    "tagged": ('<|python_tag|>{"name": "f", "parameters": {}}', [("f", "{}")]),
    "several": (
        ' {"type": "function", "name": "f", "parameters": {}}; {"name": "g", "parameters": {}}',
        [("f", "{}"), ("g", "{}")],
    ),
    "words after": ('{"name": "f", "parameters": {}}\n\nDone', [("f", "{}"), "Done"]),
    "an answer with a name": ('{"name": "Bob", "age": 3}', ['{"name": "Bob", "age": 3}']),
    "an answer in JSON": ('{"answer": {"a": 1}}', ['{"answer": {"a": 1}}']),
    "JSON in words": ('See {"name": "f", "parameters": {}}', ['See {"name": "f", "parameters": {}}']),
    "the built-in tools' code": ('<|python_tag|>search.call(query="a")', ['<|python_tag|>search.call(query="a")']),
    "the second broken": ('{"name": "f", "parameters": {}}; {"x": 1}', [("f", "{}"), '; {"x": 1}']),
}
MISTRAL_CASES: dict[str, tuple[str, Found]] = {
    "list": (
        '[TOOL_CALLS] [{"name": "f", "arguments": {"a": [1]}}, {"name": "g", "arguments": {}, "id": "abc"}]',
        [("f", '{"a": [1]}'), ("g", "{}")],
    ),
    "by name": ('Well.[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]g{}', ["Well.", ("f", '{"a": 1}'), ("g", "{}")]),
    "with ids": ('[TOOL_CALLS]f[CALL_ID]abcdefghi[ARGS]{"a": 1}', [("f", '{"a": 1}')]),
    "broken": ("[TOOL_CALLS]f(1)", ["[TOOL_CALLS]f(1)"]),
    "empty": ("[TOOL_CALLS][] no", ["[TOOL_CALLS][] no"]),
    "unknown mark": ("[TOOL_CALLS]f[OTHER]{}", ["[TOOL_CALLS]f[OTHER]{}"]),
}
PYTHONIC_CASES: dict[str, tuple[str, Found]] = {
    "call": ("[f(a=1)]", [("f", '{"a": 1}')]),
    "several": ("[f(a='x', b=[1, 2,]), m.g()]", [("f", '{"a": "x", "b": [1, 2]}'), ("m.g", "{}")]),
    "tagged": ("<|python_start|>[f(a=True)]<|python_end|>", [("f", '{"a": true}')]),
    "values": (
        """[f(a={'k': None, "l": -0.5}, b='it\\'s "q"\\n\\x41\\d', c = [], d=[[],{}],)]""",
        [("f", '{"a": {"k": null, "l": -0.5}, "b": "it\'s \\"q\\"\\nA\\\\d", "c": [], "d": [[],{}]}')],
    ),
    "a link": ("[see](this) [f(a=1)]", ["[see](this) [f(a=1)]"]),
    "positional argument": ("[f(1)]", ["[f(1)]"]),
    "not a call": ("[1, 2]", ["[1, 2]"]),
    "a name as value": ("[f(a=b)]", [("f", '{"a": '), "b)]"]),
    "words before": ("So: [f(a=1)]", ["So: [f(a=1)]"]),
}
B, E, C, S, D = (
    "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>",
    "<｜tool▁sep｜>", "<｜tool▁call▁end｜>",
)  # fmt: skip
DEEPSEEK_CASES: dict[str, tuple[str, Found]] = {
    "v3": (
        f'Hm.{B}{C}function{S}f\n```json\n{{"a": 1}}\n```{D}\n{C}function{S}g\n```json\n{{}}\n```{D}{E}',
        ["Hm.", ("f", '{"a": 1}'), ("g", "{}")],
    ),
    "v3.1": (f'{B}{C}f{S}{{"a": 1}}{D}{C}function{S}{{}}{D}{E}', [("f", '{"a": 1}'), ("function", "{}")]),
    "broken": (f"{B}{C}f{S}oops{D}{E}", [f"{C}f{S}oops{D}"]),
    "no name": (f"{C}{S}{{}}{D}", [f"{C}{S}{{}}{D}"]),
}
THINK_CASES: dict[str, tuple[str, Found]] = {
    "thought": ("<think>\nLet me\nsee.\n</think>\n\nYes. ", [{"r": "Let me\nsee."}, "Yes. "]),
    "tags after text": ("Yes <think>no</think>", ["Yes <think>no</think>"]),
    "nothing thought": ("<think>\n\n</think>\n\nYes", ["Yes"]),
    "cut": ("<think>Let me </th", [{"r": "Let me </th"}]),
    "and a call": (f"<think>f?</think>\n{CALL}", [{"r": "f?"}, ("f", ARGUMENTS)]),
    "a call inside": (f"<think>{CALL}</think>Yes", [{"r": CALL}, "Yes"]),
}
HARMONY_CASES: dict[str, tuple[str, Found]] = {
    "final": ("<|channel|>final<|message|>Yes", ["Yes"]),
    "thought": (
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Yes<|return|>",
        [{"r": "Hm."}, "Yes"],
    ),
    "call": (
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary to=functions.f "
        '<|constrain|>json<|message|>{"a": 1}<|call|>',
        [{"r": "Hm."}, ("f", '{"a": 1}')],
    ),
    "call without thoughts": (' to=functions.f<|channel|>commentary json<|message|>{"a": 1}', [("f", '{"a": 1}')]),
    "preamble": (
        "<|channel|>commentary<|message|>I will.<|end|><|start|>assistant to=functions.f<|channel|>commentary"
        "<|message|>{}<|call|>",
        ["I will.", ("f", "{}")],
    ),
    "broken": ("<|channel|>commentary to=functions.f<|message|>[1]", ["[1]"]),
    "half a header": ("<|channel|>anal", []),
    "no message": ("<|channel|>" + "x" * 600, ["<|channel|>" + "x" * 600]),
    "not harmony": ("Yes", ["Yes"]),
}
SCHEMAS: dict[str, object] = {
    "f": {
        "properties": {
            "s": {"type": "string"},
            "i": {"type": "integer"},
            "b": {"type": "boolean"},
            "l": {"type": "array"},
            "o": {"$ref": "#/$defs/object"},
            "m": {"anyOf": [{"type": "string"}, {"type": "null"}, {"type": "array"}]},
        },
        "$defs": {"object": {"type": "object"}},
    }
}


def glm(name: str, **arguments: str) -> str:
    pairs = "".join(f"<arg_key>{k}</arg_key>\n<arg_value>{v}</arg_value>\n" for k, v in arguments.items())
    return f"<tool_call>{name}\n{pairs}</tool_call>"


GLM_CASES: dict[str, tuple[str, Found]] = {
    "call": (glm("f", s="5", i="5"), [("f", '{"s": "5", "i": 5}')]),
    "text around": (f"Well.\n{glm('f')}\n{glm('g')}\nDone", ["Well.", ("f", "{}"), ("g", "{}"), "\nDone"]),
    "no newlines": (
        "<tool_call>f<arg_key>s</arg_key><arg_value>a</arg_value></tool_call><tool_call>now</tool_call>",
        [("f", '{"s": "a"}'), ("now", "{}")],
    ),
    "a string as it is": (
        glm("f", s=' "a"\n<arg_valu</tool_call> '),
        [("f", '{"s": " \\"a\\"\\n<arg_valu</tool_call> "}')],
    ),
    "an empty string": (glm("f", s="", i=""), [("f", '{"s": "", "i": ""}')]),
    "json": (
        glm("f", l='[1, "</arg_value>", {}]', o=' {"a": null} ', b="true"),
        [("f", '{"l": [1, "</arg_value>", {}], "o": {"a": null}, "b": true}')],
    ),
    "python": (glm("f", b="True", l="['a', None]"), [("f", '{"b": true, "l": ["a", null]}')]),
    "not of its type": (glm("f", i="five", b="2 or 3"), [("f", '{"i": "five", "b": "2 or 3"}')]),
    "several types": (
        glm("f", m="null")
        + glm("f", m=' ["</arg_value>"]\n')
        + glm("f", m="nulls")
        + glm("f", m="5")
        + glm("f", m="[a]"),
        [
            ("f", '{"m": null}'),
            ("f", '{"m": ["</arg_value>"]}'),
            ("f", '{"m": "nulls"}'),
            ("f", '{"m": "5"}'),
            ("f", '{"m": "[a]"}'),
        ],
    ),
    "no schema": (
        glm("g", a="5", b="five", c='{"d": [1]}', e='"f"', h="[1] i", j="null", k="1.5e3", n="  ", q="'tis"),
        [
            (
                "g",
                '{"a": 5, "b": "five", "c": {"d": [1]}, "e": "\\"f\\"", "h": "[1] i", "j": null, "k": 1.5e3, '
                '"n": "  ", "q": "\'tis"}',
            )
        ],
    ),
    "half a value": ("<tool_call>f\n<arg_key>s</arg_key>\n<arg_value>Kö</arg_val", [("f", '{"s": "Kö')]),
    "half a name": ("<tool_call>f", ["<tool_call>f"]),
    "broken json": (
        "<tool_call>f\n<arg_key>l</arg_key>\n<arg_value>[1, x]</arg_value></tool_call>",
        [("f", '{"l": [1, '), "x]</arg_value></tool_call>"],
    ),
    "an unfinished list": (  # its end could be part of a string
        glm("g", a='["b') + '" c</arg_value></tool_call>',
        [("g", '{"a": "[\\"b</arg_value>\\n</tool_call>\\" c"}')],
    ),
    "a json call": ('<tool_call>{"name": "f"}</tool_call>', ['<tool_call>{"name": "f"}</tool_call>']),
    "words": ("<tool_call>f is called</tool_call>", ["<tool_call>f is called</tool_call>"]),
}
MINIMAX_CASES: dict[str, tuple[str, Found]] = {
    "calls": (
        'Hm.\n<minimax:tool_call>\n<invoke name="f">\n<parameter name="s">a\nb</parameter>\n'
        '<parameter name="i">1</parameter>\n</invoke>\n<invoke name="g">\n</invoke>\n</minimax:tool_call>\nDone',
        ["Hm.", ("f", '{"s": "a\\nb", "i": 1}'), ("g", "{}"), "\nDone"],
    ),
    "never closed": ('<minimax:tool_call>\n<invoke name="f">\n</invoke>\n', [("f", "{}")]),
    "cut in the second": ('<minimax:tool_call><invoke name="f"></invoke>\n<inv', [("f", "{}")]),
    "the second broken": (
        '<minimax:tool_call><invoke name="f"></invoke>\n<invoke>g</invoke>',
        [("f", "{}"), "\n<invoke>g</invoke>"],
    ),
    "empty": ("<minimax:tool_call></minimax:tool_call>", ["<minimax:tool_call></minimax:tool_call>"]),
}
SEED_CASES: dict[str, tuple[str, Found]] = {
    "call": (
        "\n<seed:tool_call>\n<function=f>\n<parameter=s>True</parameter>\n<parameter=b>True</parameter>\n"
        "<parameter=l>['a', \"it's\"]</parameter>\n</function>\n</seed:tool_call>",
        [("f", '{"s": "True", "b": true, "l": ["a", "it\'s"]}')],
    ),
    "broken": ("<seed:tool_call>\n<functions=f>", ["<seed:tool_call>\n<functions=f>"]),
}
CODER_CASES: dict[str, tuple[str, Found]] = {
    "call": (
        "<tool_call>\n<function=f>\n<parameter=s>\n\na\n\n</parameter>\n<parameter=i>\n5\n</parameter>\n"
        "</function>\n</tool_call>",
        [("f", '{"s": "\\na\\n", "i": 5}')],
    ),
    "without newlines": (
        "<tool_call><function=f><parameter=s>a</parameter><parameter=m>null</parameter></function></tool_call>",
        [("f", '{"s": "a", "m": null}')],
    ),
    "empty strings": (
        "<tool_call>\n<function=f>\n<parameter=s>\n\n</parameter>\n<parameter=m>\n</parameter>\n</function>\n"
        "</tool_call>",
        [("f", '{"s": "", "m": ""}')],
    ),
    "half a value": (
        "<tool_call>\n<function=f>\n<parameter=s>\na\n</para",
        [("f", '{"s": "a')],
    ),
    "a json call": ('<tool_call>{"name": "f"}</tool_call>', ['<tool_call>{"name": "f"}</tool_call>']),
}
K_OPEN, K_CALL, K_ARGS, K_END, K_CLOSE = (
    "<|tool_calls_section_begin|>", "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>",
    "<|tool_calls_section_end|>",
)  # fmt: skip
KIMI_CASES: dict[str, tuple[str, Found]] = {
    "calls": (
        f'Hm.{K_OPEN}{K_CALL}functions.f:0{K_ARGS}{{"a": 1}}{K_END}{K_CALL} m.g:12 {K_ARGS} {{}}{K_END}{K_CLOSE} Done',
        ["Hm.", ("f", '{"a": 1}'), ("m.g", "{}"), " Done"],
    ),
    "a colon in the name": (f"{K_CALL}functions.a:b:3{K_ARGS}{{}}{K_END}", [("a:b", "{}")]),
    "no number": (f"{K_CALL}f{K_ARGS}{{}}{K_END}", [("f", "{}")]),
    "broken": (f"{K_CALL}f:0{K_ARGS}[1]{K_END}", [f"{K_CALL}f:0{K_ARGS}[1]{K_END}"]),
    "no arguments": (f"{K_CALL}f:0{K_END} it", [f"{K_CALL}f:0{K_END} it"]),
    "cut": (f'{K_OPEN}{K_CALL}functions.f:0{K_ARGS}{{"a": "b', [("f", '{"a": "b')]),
}
NEMOTRON_CASES: dict[str, tuple[str, Found]] = {
    "calls": (
        'Hm.\n<TOOLCALL>[{"name": "f", "arguments": {"a": 1}}, {"name": "g", "arguments": {}}]</TOOLCALL>\nDone',
        ["Hm.", ("f", '{"a": 1}'), ("g", "{}"), "\nDone"],
    ),
    "an object": ('<TOOLCALL>{"name": "f"}</TOOLCALL>', ['<TOOLCALL>{"name": "f"}</TOOLCALL>']),
    "empty": ("<TOOLCALL>[]</TOOLCALL>", ["<TOOLCALL>[]</TOOLCALL>"]),
}
GRANITE_CASES: dict[str, tuple[str, Found]] = {
    "calls": (
        '<|tool_call|>[{"name": "f", "arguments": {"a": 1}}, {"name": "g", "arguments": {}}]',
        [("f", '{"a": 1}'), ("g", "{}")],
    ),
    "an object": ('Hm. <|tool_call|> {"name": "f", "arguments": {}} x', ["Hm.", ("f", "{}"), " x"]),
    "written out": ('<tool_call>[{"name": "f", "arguments": {}}]', [("f", "{}")]),
    "broken": ("<|tool_call|>[1]", ["<|tool_call|>[1]"]),
}
LFM2_CASES: dict[str, tuple[str, Found]] = {
    "calls": (
        "<|tool_call_start|>[f(a='x', b={\"c\": null}), g()]<|tool_call_end|>Looking.",
        [("f", '{"a": "x", "b": {"c": null}}'), ("g", "{}"), "Looking."],
    ),
    "without tags": ("[f(a=1)]", ["[f(a=1)]"]),
    "broken": ("<|tool_call_start|>f()<|tool_call_end|>", ["<|tool_call_start|>f()<|tool_call_end|>"]),
}
ANSWER_CASES: dict[str, tuple[str, Found]] = {
    "answer": ("<think>Hm.\n</think>\n\n<response>\nYes. \n</response>\n", [{"r": "Hm."}, "Yes."]),
    "no answer tags": ("<think>Hm.</think>\nYes</response>", [{"r": "Hm."}, "Yes</response>"]),
    "inside": ("Say <response>a</response>", ["Say <response>a</response>"]),
    "not closed": ("<think>Hm.</think><response>Yes", [{"r": "Hm."}, "Yes"]),
    "a call": (f"<think>Hm.</think>\n\n\n{CALL}\n", [{"r": "Hm."}, ("f", ARGUMENTS)]),
    "an answer and a call": (f"<response>\nYes\n</response>\n{CALL}", ["Yes", ("f", ARGUMENTS)]),
    "in reasoning": ("<think><response>a</response></think>b", [{"r": "<response>a</response>"}, "b"]),
}
GEMMA_CASES: dict[str, tuple[str, Found]] = {
    "calls": (
        '<|channel>thought\nHm.<channel|>Well.<|tool_call>call:f{a:<|"|>x "y"\n<|"|>,b:1}<tool_call|>'
        "<|tool_call>call:g{}<tool_call|>",
        [{"r": "Hm."}, "Well.", ("f", '{"a":"x \\"y\\"\\n","b":1}'), ("g", "{}")],
    ),
    "nested": (
        '<|tool_call>call:f{a:{b:[<|"|><|<|"|>,true,None],<|"|>c d<|"|>:-1.5}}<tool_call|>',
        [("f", '{"a":{"b":["<|",true,null],"c d":-1.5}}')],
    ),
    "no thoughts": ("<|channel>thought\n<channel|>Yes", ["Yes"]),
    "another channel": ("<|channel>final\nYes", ["<|channel>final\nYes"]),
    "cut": ('<|tool_call>call:f{a:<|"|>x<|', [("f", '{"a":"x')]),
    "no name": ("<|tool_call>call:{}<tool_call|>", ["<|tool_call>call:{}<tool_call|>"]),
    "broken": ("<|tool_call>call:f{a:b}<tool_call|>", [("f", '{"a":'), "b}<tool_call|>"]),
}
GEMMA = find_grammar("gemma4", "gemma4", True)
assert GEMMA is not None and "<|channel>" in GEMMA.all_marks
ANSWERS = find_grammar("ernie45", "ernie45", True)
assert ANSWERS is not None
HERMES, LLAMA3_JSON, MISTRAL, DEEPSEEK, PYTHONIC, HARMONY = (
    find_family(name, "none").calls
    for name in ("hermes", "llama3_json", "mistral", "deepseek_v3", "pythonic", "openai")
)
THINK = find_grammar("hermes", "qwen3", True)
assert THINK is not None
FAMILIES: dict[str, tuple[Grammar, dict[str, tuple[str, Found]]]] = {
    "hermes": (HERMES, HERMES_CASES),
    "llama3_json": (LLAMA3_JSON, LLAMA3_CASES),
    "mistral": (MISTRAL, MISTRAL_CASES),
    "pythonic": (PYTHONIC, PYTHONIC_CASES),
    "deepseek": (DEEPSEEK, DEEPSEEK_CASES),
    "think": (THINK, THINK_CASES),
    "harmony": (HARMONY, HARMONY_CASES),
    "ernie45": (ANSWERS, ANSWER_CASES),
    "gemma4": (GEMMA, GEMMA_CASES),
    **{
        name: (find_family(name, "none").calls._replace(schemas=SCHEMAS), cases)
        for name, cases in {
            "glm45": GLM_CASES,
            "kimi_k2": KIMI_CASES,
            "nemotron_json": NEMOTRON_CASES,
            "granite": GRANITE_CASES,
            "lfm2": LFM2_CASES,
            "minimax_m2": MINIMAX_CASES,
            "seed_oss": SEED_CASES,
            "qwen3_coder": CODER_CASES,
        }.items()
    },
}
CASES = [(family, name) for family, (_, cases) in FAMILIES.items() for name in cases]


def events_of(grammar: Grammar, pieces: list[str], prompt: str = "") -> list[Event]:
    lexer = Lexer(grammar, prompt)
    return joined([event for piece in pieces for event in lexer.push(piece)] + lexer.flush())


def parse(grammar: Grammar, pieces: list[str], prompt: str = "") -> Found:
    """Texts, reasoning and calls in order."""
    found: Found = []
    for event in events_of(grammar, pieces, prompt):
        match event:
            case Text(text=text):
                found.append(text)
            case Reasoning(text=text):
                found.append({"r": text})
            case CallStart(name=name):
                found.append((name, ""))
            case CallArguments(text=text):
                assert found and isinstance(found[-1], tuple) and text
                found[-1] = (found[-1][0], found[-1][1] + text)
    assert "" not in found and {"r": ""} not in found
    return found


@pytest.mark.parametrize(("family", "name"), CASES)
def test_cases_whole_and_cut_at_every_position(family: str, name: str) -> None:
    grammar, cases = FAMILIES[family]
    text, expected = cases[name]
    assert parse(grammar, [text]) == expected
    assert parse(grammar, list(text)) == expected
    for cut in range(0, len(text), max(1, len(text) // 500)):
        assert parse(grammar, [text[:cut], text[cut:]]) == expected, cut


def words_of(family: str) -> list[str]:
    """The pieces of a family's random outputs: whole tags, half tags, and slices of its cases."""
    grammar, cases = FAMILIES[family]
    text = "".join(text for text, _ in cases.values() if len(text) < 600)
    marks = [*grammar.all_marks, *(mark[: len(mark) // 2] for mark in grammar.all_marks)]
    slices = [text[at : at + 7] for at in range(0, len(text), 5)]
    return [*marks, *marks, *slices, *'{}[]":,\\ \n=()', '{"name": "f", ', '"arguments": {', "function", "assistant"]


@pytest.mark.parametrize("family", FAMILIES)
def test_events_of_random_outputs_do_not_depend_on_the_cuts(family: str) -> None:
    grammar, words = FAMILIES[family][0], words_of(family)
    for seed in range(200):
        rng = random.Random(seed)
        text = "".join(rng.choices(words, k=rng.randrange(24)))
        whole = events_of(grammar, [text])
        assert events_of(grammar, list(text)) == whole, f"seed {seed}: {text!r}"
        for _ in range(4):
            cuts = sorted(rng.choices(range(len(text) + 1), k=rng.randrange(6)))
            pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
            assert events_of(grammar, pieces) == whole, f"seed {seed}: {pieces}"


@pytest.mark.parametrize("family", FAMILIES)
def test_events_of_mutated_cases_do_not_depend_on_the_cut(family: str) -> None:
    grammar, cases = FAMILIES[family]
    texts = [text for text, _ in cases.values() if 0 < len(text) < 200]
    for seed in range(40):
        rng = random.Random(seed)
        text = rng.choice(texts)
        at = rng.randrange(len(text))
        text = text[:at] + rng.choice(["", "}", '"', "x", "\\", " ", text[:9]]) + text[at + rng.randrange(2) :]
        whole = events_of(grammar, [text])
        for cut in range(1, len(text)):
            assert events_of(grammar, [text[:cut], text[cut:]]) == whole, f"seed {seed}, cut {cut}: {text!r}"


@pytest.mark.parametrize("family", FAMILIES)
def test_arguments_are_json_objects_or_beginnings_of_one(family: str) -> None:
    grammar, words = FAMILIES[family][0], words_of(family)
    for seed in range(300):
        rng = random.Random(seed)
        text = "".join(rng.choices(words, k=rng.randrange(40)))
        for found in parse(grammar, [text]):
            if isinstance(found, tuple):
                try:
                    assert isinstance(json.loads(found[1]), dict)
                except json.JSONDecodeError as error:
                    assert error.pos >= len(found[1]) - 6 or "Unterminated" in error.msg, f"seed {seed}: {text!r}"


def test_reasoning_may_begin_in_the_prompt() -> None:
    assert THINK is not None and HARMONY is not None
    inside = "<|im_start|>assistant\n<think>\n"
    assert parse(THINK, ["so</thi", "nk>\nYes"], inside) == [{"r": "so"}, "Yes"]
    assert parse(THINK, ["so"], inside) == [{"r": "so"}]
    assert parse(THINK, ["so"], "<think>\n\n</think>\n\n") == ["so"]
    question = "what is <think><|im_end|>\n<|im_start|>assistant\n"
    assert parse(THINK, ["a tag"], question) == ["a tag"]
    assert parse(HARMONY, ["Hm"], "<|start|>assistant<|channel|>analysis<|message|>") == [{"r": "Hm"}]
    assert parse(HARMONY, ["Hm"], "<|channel|>analysis<|message|>Hm<|end|><|start|>assistant") == ["Hm"]


def test_arguments_are_streamed() -> None:
    lexer = Lexer(HERMES)
    assert lexer.push('<tool_call>{"name": "f", "arguments": {"a"') == [CallStart("f"), CallArguments('{"a"')]
    assert lexer.push(": 1") == [CallArguments(": 1")]
    assert lexer.push("}}") == [CallArguments("}")]
    lexer = Lexer(PYTHONIC)
    assert lexer.push("[f(a='x") == [CallStart("f"), CallArguments('{"a": "x')]


def test_deeply_nested_arguments_continue_as_text() -> None:
    found = parse(HERMES, ['<tool_call>{"name": "f", "arguments": {"a": ' + "[" * 100])
    assert found == [("f", '{"a": ' + "[" * 63), "[" * 37]


HOSTILE = [
    
        "<tool_call>",
        "<",
        " ",
        '<tool_call>{"a": ',
        "<tool_call>{",
        '<tool_call>{"arguments": [',
        '{"a":',
        "[TOOL_CALLS]",
    
        "[TOOL_CALLS]f",
        "[f(",
        "<|python_start|>",
        C,
        C + "f" + S,
        "<|channel|>",
        "<|start|>",
        "<think>",
        "<think",
        "</think>",
    "<tool_call>f<arg_key>", "</arg_value>", "</arg_valu", "\n", "n",
    "<|channel|>analysis<|message|>", '<tool_call>{"name": "f", "arguments": {"a": "', "1", '"', "[", "{", "\\",
]  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
def test_hostile_output_takes_bounded_memory_and_linear_work(family: str) -> None:
    grammar = FAMILIES[family][0]

    def read(text: str) -> None:
        lexer = Lexer(grammar)
        num_out = num_in = 0
        for at in range(0, len(text), 8):
            piece = text[at : at + 8]
            num_in += len(piece)
            num_out += sum(len(event[0]) for event in lexer.push(piece))
            assert num_in - num_out <= MAX_HELD + 10_000 or num_out > 0
        lexer.flush()

    begins = {
        "hermes": '<tool_call>{"arguments": ',
        "llama3_json": '{"arguments": ',
        "pythonic": "[f(a=",
        "glm45": "<tool_call>g<arg_key>a</arg_key><arg_value>",
        "qwen3_coder": "<tool_call><function=f><parameter=m>",
    }
    for unit in HOSTILE:
        for begin in {"", begins.get(family, "")}:
            short, long = (begin + unit * (length // len(unit)) for length in (250, 2_000))
            work = {text: lines_of(parsers, partial(read, text)) for text in (short, long)}
            assert work[long] < 12 * work[short], unit
            read(begin + unit * (16_000 // len(unit)))


def test_held_text_is_bounded() -> None:
    begin = '<tool_call>{"arguments": {"a": "'
    (event,) = Lexer(HERMES).push(begin + "x" * MAX_HELD)
    assert isinstance(event, Text) and event.text.startswith(begin)
    assert parse(HERMES, [begin, "x" * MAX_HELD]) == [begin + "x" * MAX_HELD]


def test_no_tag_contains_another() -> None:
    for grammar, _ in FAMILIES.values():
        for tags in (grammar.tags, grammar.reasoning_tags):
            assert not any(a in b for a in tags for b in tags if a != b)


def test_parser_names_select_grammars() -> None:
    assert find_grammar("hermes", "none", True) is HERMES
    assert find_grammar("hermes", "none", False) is None and find_grammar("none", "none", True) is None
    assert find_grammar("openai", "none", False) is HARMONY and find_grammar("none", "openai_gptoss", False) is HARMONY
    both = find_grammar("llama3_json", "mistral", True)
    assert both is not None
    assert parse(both, ['[THINK]a[/THINK]{"name": "f", "parameters": {}}']) == [{"r": "a"}, ("f", "{}")]
    reasoning_only = find_grammar("hermes", "qwen3", False)
    assert reasoning_only is not None and parse(reasoning_only, [f"<think>a</think>{CALL}"]) == [{"r": "a"}, CALL]
    assert parse(NO_CALLS, ["[TOOL_CALLS]"]) == ["[TOOL_CALLS]"]
