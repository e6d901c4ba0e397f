"""MiniMax-M2: `<minimax:tool_call>`, for each call `<invoke name="f">` with `<parameter name="a">1</parameter>` for
each argument and `</invoke>`, then `</minimax:tool_call>`. Reasoning is `<think>…</think>`, which the prompt opens."""

from ..elements import Elements
from ..family import Family

_CALLS = Elements(
    open="<minimax:tool_call>",
    name=('<invoke name="', '">'),
    key=('<parameter name="', '">'),
    value=("", "</parameter>"),
    end="</invoke>",
    close="</minimax:tool_call>",
    holds_several=True,
)
M2 = Family(
    calls=_CALLS.grammar,
    spell=_CALLS.spell,
    shows_calls=lambda template: _CALLS.open in template,
    reasoning=("<think>", "</think>"),
    shows_reasoning=lambda template: _CALLS.open in template,
)
