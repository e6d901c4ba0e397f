"""The chat template of the demo model and its rendering.

Owns the one Jinja text that goes into `tokenizer_config.json`; the training data
is rendered with it too, so training and serving cannot drift apart. The template
writes JSON with a macro of its own: the `tojson` filter of plain Jinja sorts keys
and escapes HTML while the one in transformers does neither, and the result has to
be the same under both.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from jinja2 import Template
from jinja2.sandbox import ImmutableSandboxedEnvironment

Message = Mapping[str, Any]
Tool = Mapping[str, Any]

END_OF_TEXT = "<|endoftext|>"
TURN_START = "<|im_start|>"
TURN_END = "<|im_end|>"

CHAT_TEMPLATE = r"""
{%- macro json(value) -%}
  {%- if value is none -%}null
  {%- elif value is boolean -%}{{ 'true' if value else 'false' }}
  {%- elif value is string -%}
    {{- '"' ~ (value | replace('\\', '\\\\') | replace('"', '\\"') | replace('\n', '\\n')
        | replace('\r', '\\r') | replace('\t', '\\t')) ~ '"' -}}
  {%- elif value is mapping -%}
    {{- '{' -}}
    {%- for key in value -%}
      {{- json(key) ~ ': ' ~ json(value[key]) -}}
      {%- if not loop.last -%}{{- ', ' -}}{%- endif -%}
    {%- endfor -%}
    {{- '}' -}}
  {%- elif value is number -%}{{- value -}}
  {%- else -%}
    {{- '[' -}}
    {%- for item in value -%}
      {{- json(item) -}}
      {%- if not loop.last -%}{{- ', ' -}}{%- endif -%}
    {%- endfor -%}
    {{- ']' -}}
  {%- endif -%}
{%- endmacro -%}
{%- macro text(content) -%}
  {%- if content is string -%}{{- content -}}
  {%- elif content -%}
    {%- for part in content -%}
      {%- if part is string -%}{{- part -}}
      {%- elif part.type == 'text' -%}{{- part.text -}}
      {%- endif -%}
    {%- endfor -%}
  {%- endif -%}
{%- endmacro -%}
{%- set merged = messages and messages[0].role in ('system', 'developer') -%}
{%- if tools -%}
  {{- '<|im_start|>system\n' -}}
  {%- if merged -%}{{- text(messages[0].content) ~ '\n\n' -}}{%- endif -%}
  {{- '# Tools\nYou may call these functions:\n<tools>\n' -}}
  {%- for tool in tools -%}{{- json(tool) ~ '\n' -}}{%- endfor -%}
  {{- '</tools>\nTo call one, answer with its name and arguments as JSON inside '
      ~ '<tool_call></tool_call>.<|im_end|>\n' -}}
{%- endif -%}
{%- for message in messages -%}
  {%- if not (tools and merged and loop.first) -%}
    {{- '<|im_start|>' ~ ('system' if message.role == 'developer' else message.role) ~ '\n' -}}
    {%- set body = text(message.content) -%}
    {%- if message.role == 'tool' -%}
      {{- '<tool_response>\n' ~ body ~ '\n</tool_response>' -}}
    {%- else -%}
      {{- body -}}
      {%- if message.role == 'assistant' and message.tool_calls -%}
        {%- for call in message.tool_calls -%}
          {%- set function = call.function if call.function else call -%}
          {%- if body or not loop.first -%}{{- '\n' -}}{%- endif -%}
          {{- '<tool_call>\n{"name": ' ~ json(function.name) ~ ', "arguments": ' -}}
          {%- if function.arguments is string -%}{{- function.arguments -}}
          {%- else -%}{{- json(function.arguments) -}}
          {%- endif -%}
          {{- '}\n</tool_call>' -}}
        {%- endfor -%}
      {%- endif -%}
    {%- endif -%}
    {{- '<|im_end|>\n' -}}
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}
""".strip()


@cache
def _compiled() -> Template:
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    return environment.from_string(CHAT_TEMPLATE)


def render(
    messages: Sequence[Message],
    tools: Sequence[Tool] | None = None,
    add_generation_prompt: bool = False,
) -> str:
    """The text of a chat, as the model reads it."""
    return _compiled().render(messages=messages, tools=tools, add_generation_prompt=add_generation_prompt)


def render_answer(message: Message) -> str:
    """The text the model must generate for one assistant message, without the end mark."""
    head = f"{TURN_START}assistant\n"
    return render([message])[len(head) : -len(TURN_END) - 1]
