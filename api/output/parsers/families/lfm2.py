"""LFM2: `<|tool_call_start|>[name(key="value", …), …]<|tool_call_end|>`, calls as in Python, which Llama 4 writes
between other tags. LFM2.5 reasons in `<think>…</think>`."""

from .pythonic import tagged_family

_START = "<|tool_call_start|>"
LFM2 = tagged_family(_START, "<|tool_call_end|>")._replace(
    shows_calls=lambda template: _START in template or "<|tool_list_start|>" in template
)
