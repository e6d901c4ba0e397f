"""Qwen3-Coder, Qwen3.5 and Nemotron 3: `<tool_call>`, `<function=f>`, for each argument `<parameter=a>`, the value on
lines of its own and `</parameter>`, then `</function>` and `</tool_call>`."""

from ..elements import Elements
from ..family import Family

_CALLS = Elements(
    open="<tool_call>",
    name=("<function=", ">"),
    key=("<parameter=", ">"),
    value=("", "</parameter>"),
    end="</function>",
    close="</tool_call>",
    pad="\n",
)
QWEN3_CODER = Family(
    calls=_CALLS.grammar,
    spell=_CALLS.spell,
    shows_calls=lambda template: _CALLS.open in template and "<function=" in template,
)
