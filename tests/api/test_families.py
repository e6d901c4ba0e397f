"""A family of tool calls and reasoning from an operator's module: finding, detecting, parsing and spelling it."""

import json
import shutil
from pathlib import Path

import pytest
from drawing import draw, grammars_of, json_tokenizer
from harness import Answer, FakeEngine, request

from pagewire.api.output.parsers.registry import find_family
from pagewire.config import families
from pagewire.config.flags import make_config
from pagewire.errors import ConfigError
from pagewire.ipc.messages import Constraint
from pagewire.procs.prepare import prepare

ROOT = Path(__file__).parents[2]
WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 9}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": WEATHER}}]


@pytest.fixture
def target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The family's name on the command line. Each test has a module of its own."""
    name = f"family_{tmp_path.name}"
    shutil.copy(ROOT / "docs" / "examples" / "tagged_calls.py", tmp_path / f"{name}.py")
    monkeypatch.syspath_prepend(str(tmp_path))
    return f"{name}:FAMILY"


def chat(pieces: list[str], target: str, **fields: object) -> Answer:
    engine = FakeEngine(pieces)
    body = {"messages": [{"role": "user", "content": "hi"}], "tools": TOOLS, **fields}
    return request(engine, "/v1/chat/completions", body, tool_call_parser=target, reasoning_parser=target)


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_output_of_a_custom_family_is_parsed(target: str, size: int) -> None:
    text = '<plan>Look it up.</plan>Wait.\n<call:weather>{"city": "Köln"}</call><call:weather>{"city": "Bonn"}</call>'
    pieces = [text[at : at + size] for at in range(0, len(text), size)]
    message = chat(pieces, target).json["choices"][0]["message"]
    assert (message["reasoning"], message["content"]) == ("Look it up.", "Wait.")
    calls = [call["function"] for call in message["tool_calls"]]
    assert [(call["name"], json.loads(call["arguments"])["city"]) for call in calls] == [
        ("weather", "Köln"),
        ("weather", "Bonn"),
    ]


@pytest.mark.parametrize("special", [True, False])
def test_forced_calls_of_a_custom_family_are_parsed(target: str, special: bool) -> None:
    rules = find_family(target, target).spell_calls([("weather", WEATHER)], several=True)
    assert rules is not None
    tokenizer = json_tokenizer([*rules.marks, "<plan>", "</plan>"], special=special)
    constraint = Constraint("lark", "\n".join(["start: calls", *rules.rules]), lark_marks=rules.marks)
    for seed in range(4):
        ids = draw(grammars_of(tokenizer).compile(constraint, ""), tokenizer, seed)
        message = chat([tokenizer.decode(ids, False)], target).json["choices"][0]["message"]
        assert message["content"] is None and 1 <= len(message["tool_calls"]) <= 16
        for call in message["tool_calls"]:
            assert json.loads(call["function"]["arguments"]).keys() == {"city"}


def test_a_family_in_the_tables_is_detected_from_the_chat_template(
    target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for table in (families.TOOL_CALL_PARSERS, families.REASONING_PARSERS):
        monkeypatch.setitem(table, "tagged", target)
    template = tmp_path / "chat.jinja"
    template.write_text("Call a tool as <call:name>{...}</call>.{{ messages[0].content }}<plan>")
    config = prepare(make_config(chat_template=str(template)))
    assert (config.tool_call_parser, config.reasoning_parser) == ("tagged", "tagged")
    assert find_family("tagged", "none") == find_family(target, "none")
    with pytest.raises(ConfigError, match=r"'tagd' is not known; there are .* tagged, or write module:FAMILY"):
        prepare(make_config(tool_call_parser="tagd"))


@pytest.mark.parametrize(
    ("flag", "name", "words"),
    [
        ("tool_call_parser", "pagewire.api.output.parsers.families.qwen3:QWEN3", "has no calls"),
        ("reasoning_parser", "pagewire.api.output.parsers.families.hermes:HERMES", "has no reasoning"),
    ],
)
def test_a_family_without_the_part_that_the_flag_sets_is_refused(flag: str, name: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        prepare(make_config(**{flag: name}))


@pytest.mark.parametrize("flag", ["tool_call_parser", "reasoning_parser"])
@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("hermes2", "'hermes2' is not known; there are "),
        ("no_such_module:FAMILY", "no_such_module cannot be imported"),
        ("json:JSONDecoder", "is not a Family"),
        ("json:NOTHING", "is not a Family"),
    ],
)
def test_unknown_family_names_are_refused_before_the_start(flag: str, name: str, words: str) -> None:
    with pytest.raises(ConfigError, match=f"--{flag.replace('_', '-')} .*{words}"):
        prepare(make_config(**{flag: name}))


def test_arguments_without_quotes_have_the_types_of_the_request_tools() -> None:
    """The schemas come with the request, not with the family."""
    text = (
        "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>5</arg_value>\n</tool_call>"
        "<tool_call>other\n<arg_key>city</arg_key>\n<arg_value>5</arg_value>\n</tool_call>"
    )
    body = {"messages": [{"role": "user", "content": "hi"}], "tools": TOOLS}
    pieces = [text[at : at + 3] for at in range(0, len(text), 3)]
    answer = request(FakeEngine(pieces), "/v1/chat/completions", body, tool_call_parser="glm45")
    calls = [call["function"] for call in answer.json["choices"][0]["message"]["tool_calls"]]
    assert [(call["name"], json.loads(call["arguments"])) for call in calls] == [
        ("weather", {"city": "5"}),
        ("other", {"city": 5}),
    ]
