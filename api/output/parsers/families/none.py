"""Models whose tool calls cannot be read, and models that mark no reasoning.

Qwen3-Coder is one: it writes `<function=f><parameter=a>1</parameter>…`, and only the tool's schema tells whether 1 is
a number or a string.
"""

from ..family import Family

NONE = Family(shows_calls=lambda template: "<tool_call>" in template and "<function=" in template)
