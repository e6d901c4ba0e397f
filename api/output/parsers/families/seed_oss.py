"""Seed-OSS: `<seed:tool_call>`, `<function=f>`, `<parameter=a>1</parameter>` for each argument, `</function>` and
`</seed:tool_call>`. Values that are not strings are written as Python's str() does. Reasoning is
`<seed:think>…</seed:think>`."""

from ..elements import Elements
from ..family import Family

_CALLS = Elements(
    open="<seed:tool_call>",
    name=("<function=", ">"),
    key=("<parameter=", ">"),
    value=("", "</parameter>"),
    end="</function>",
    close="</seed:tool_call>",
)
SEED_OSS = Family(
    calls=_CALLS.grammar,
    spell=_CALLS.spell,
    shows_calls=lambda template: _CALLS.open in template,
    reasoning=("<seed:think>", "</seed:think>"),
    shows_reasoning=lambda template: "<seed:think>" in template,
)
