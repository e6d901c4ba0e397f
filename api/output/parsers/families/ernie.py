"""Ernie 4.5 (thinking): reasoning is `<think>…</think>`, which the prompt opens; then comes an answer in
`<response>…</response>`, or calls as Hermes writes them."""

from .hermes import HERMES

ERNIE45 = HERMES._replace(
    reasoning=("<think>", "</think>"),
    answer_tags=("<response>", "</response>"),
    shows_reasoning=lambda template: "</think>" in template and "<response>" in template,
)
