"""GLM-4.5 and later: `<tool_call>name`, for each argument `<arg_key>k</arg_key>` and `<arg_value>v</arg_value>`, then
`</tool_call>`. Up to 4.6 there are newlines between them, from 4.7 on none. Reasoning is `<think>…</think>`."""

from ..elements import Elements
from ..family import Family

_CALLS = Elements(
    open="<tool_call>",
    name=("", ""),
    key=("<arg_key>", "</arg_key>"),
    value=("<arg_value>", "</arg_value>"),
    end="</tool_call>",
)


def _is_glm(template: str) -> bool:
    return "<arg_key>" in template and "<arg_value>" in template


def _has_newlines(template: str) -> bool:
    return "</arg_key>\n" in template or "</arg_key>\\n" in template


_THINK = ("<think>", "</think>")
GLM45 = Family(
    calls=_CALLS.grammar,
    spell=_CALLS.spell,
    shows_calls=lambda template: _is_glm(template) and _has_newlines(template),
    reasoning=_THINK,
    shows_reasoning=_is_glm,
)
GLM47 = GLM45._replace(spell=_CALLS._replace(gap="").spell, shows_calls=_is_glm)
