"""Qwen3 and others that reason in `<think>…</think>`. Their tool calls are Hermes'."""

from ..family import Family

QWEN3 = Family(reasoning=("<think>", "</think>"), shows_reasoning=lambda template: "</think>" in template)
