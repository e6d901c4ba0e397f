"""Which parsers of tool calls and reasoning a chat template implies. The excerpts are those of real templates."""

import json
from pathlib import Path

import pytest

from pagewire.api.output.parsers.registry import shown_parsers
from pagewire.config.config import Config
from pagewire.config.flags import make_config
from pagewire.engine.text.template_files import read_templates
from pagewire.errors import ConfigError
from pagewire.procs.prepare import prepare

SHOWN: dict[str, tuple[str, str, str]] = {
    "qwen2.5": ("return a json object within <tool_call></tool_call> XML tags:", "hermes", "none"),
    "qwen3": ("<tool_call>\\n' }}{%- if '</think>' in content %}<think>\\n\\n</think>", "hermes", "qwen3"),
    "qwen3-coder": ("<tool_call>\\n<function=example_function_name>\\n<parameter=", "qwen3_coder", "none"),
    "qwen3.5": (
        "<tool_call>\\n<function=f>\\n<parameter=a>\\n {%- if '</think>' in content %}",
        "qwen3_coder",
        "qwen3",
    ),
    "glm 4.5": (
        "<tool_call>{name}\n<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n'\\n<think></think>'",
        "glm45",
        "glm45",
    ),
    "glm 4.7": (
        "<tool_call>{name}<arg_key>{key}</arg_key><arg_value>{value}</arg_value></tool_call><think>",
        "glm47",
        "glm45",
    ),
    "minimax m2": (
        "{% set begins = '<minimax:tool_call>' %}<invoke name=\"{name}\"> ]~b]ai\\n<think>\\n {{'</think>'}}",
        "minimax_m2",
        "minimax_m2",
    ),
    "seed-oss": (
        "{% set a = '<seed:tool_call>' %}\\n<function=name>\\n<parameter=a>1</parameter>{% set b = '<seed:think>' %}",
        "seed_oss",
        "seed_oss",
    ),
    "llama 3.1": ('"<|python_tag|>" + tool_call.name + ".call("', "llama3_json", "none"),
    "llama 3.2": (
        'Respond in the format {"name": function name, "parameters": dictionary of argument name and its value}.',
        "llama3_json",
        "none",
    ),
    "llama 4": ("Use exact format: [func_name1(param1=value1, param2=value2), func_name2(...)]", "pythonic", "none"),
    "mistral": ('{{- "[TOOL_CALLS] [" }}', "mistral", "none"),
    "magistral": ("[THINK]{{ chunk.thinking }}[/THINK] [TOOL_CALLS]", "mistral", "mistral"),
    "deepseek r1": (
        "<｜Assistant｜><think>\\n {{content.split('</think>')[-1]}} <｜tool▁call▁begin｜>' + tool['type'] + "
        "'<｜tool▁sep｜>' + name + '\\n' + '```json'",
        "deepseek_v3",
        "deepseek_r1",
    ),
    "deepseek v3.1": (
        "<｜Assistant｜></think> <｜tool▁call▁begin｜>'+name+'<｜tool▁sep｜>",
        "deepseek_v31",
        "deepseek_r1",
    ),
    "gpt-oss": ("<|start|>assistant<|channel|>analysis<|message|>", "openai", "openai_gptoss"),
    "kimi k2": ("<|tool_call_begin|>{{ id }}<|tool_call_argument_begin|>{{ arguments }}", "kimi_k2", "none"),
    "kimi k2 thinking": (
        "<think>{{ reasoning }}</think><|tool_call_begin|>{{ id }}<|tool_call_argument_begin|>",
        "kimi_k2",
        "kimi_k2",
    ),
    "kimi vl": ("{{ text.split('◁/think▷') }}", "hermes", "kimi_vl"),
    "nemotron nano 2": ("<TOOLCALL>[{{ calls }}]</TOOLCALL> {{ content.split('</think>') }}", "nemotron_json", "qwen3"),
    "nemotron 3": ("<tool_call>\\n<function=f>\\n<parameter=a>\\n '</think>'", "qwen3_coder", "qwen3"),
    "granite 3.0": ("<|start_of_role|>assistant<|end_of_role|><|tool_call|>{{ calls }}", "granite", "none"),
    "granite 3.3": (
        "<|start_of_role|>system<|end_of_role|>Think in <think></think>, answer in <response></response>. "
        "To call a tool begin with <|tool_call|>.",
        "granite",
        "granite",
    ),
    "granite 4": ("<|start_of_role|>system<|end_of_role|>\\n<tool_call>{{ call }}</tool_call>", "hermes", "none"),
    "lfm2": ("<|tool_call_start|>[{{ calls }}]<|tool_call_end|>", "lfm2", "none"),
    "lfm2.5": ("{{ content.split('</think>') }}<|tool_call_start|>[{{ calls }}]<|tool_call_end|>", "lfm2", "qwen3"),
    "gemma 4": (
        "<|channel>thought\\n<channel|><|tool_call>call:{{ name }}{ {{ arguments }} }<tool_call|>",
        "gemma4",
        "gemma4",
    ),
    "ernie 4.5": (
        "<think></think><response>{{ content }}</response><tool_call>{{ call }}</tool_call>",
        "hermes",
        "ernie45",
    ),
    "nothing": ("{{ message.content }}", "hermes", "none"),
}


@pytest.mark.parametrize("name", SHOWN)
def test_the_parsers_that_a_template_implies(name: str) -> None:
    template, calls, reasoning = SHOWN[name]
    assert shown_parsers(template) == (calls, reasoning)


def test_prepare_takes_the_parsers_from_the_template_in_use(tmp_path: Path) -> None:
    shown = prepare(Config())
    assert (shown.tool_call_parser, shown.reasoning_parser) == ("hermes", "none")
    given = tmp_path / "chat.jinja"
    given.write_text(SHOWN["magistral"][0])
    shown = prepare(make_config(chat_template=str(given)))
    assert (shown.tool_call_parser, shown.reasoning_parser) == ("mistral", "mistral")
    with pytest.raises(ConfigError, match="There is no chat template"):
        prepare(make_config(chat_template=str(tmp_path / "none.jinja")))


def test_the_files_that_templates_are_read_from(tmp_path: Path) -> None:
    assert read_templates(tmp_path) == {}
    named = [{"name": "default", "template": "a"}, {"name": "tool_use", "template": "b"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    assert read_templates(tmp_path) == {"default": "a", "tool_use": "b"}
    (tmp_path / "chat_template.jinja").write_text("c")
    assert read_templates(tmp_path) == {"default": "c"}
