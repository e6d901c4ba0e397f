"""The table of model families: the names that --tool-call-parser and --reasoning-parser take, which are vLLM's.

Each name leads to a `Family` in a file of `api.output.parsers.families`, which is imported when first needed. With
"auto", the first family that recognizes the model's chat template is taken, so a family whose strings other families'
templates may also contain comes after them.
"""

TOOL_CALL_PARSERS = {
    "openai": ".harmony:HARMONY",
    "mistral": ".mistral:MISTRAL",
    "deepseek_v3": ".deepseek:V3",
    "deepseek_v31": ".deepseek:V31",
    "none": ".none:NONE",
    "hermes": ".hermes:HERMES",
    "llama3_json": ".llama3_json:LLAMA3_JSON",
    "pythonic": ".pythonic:PYTHONIC",
}
REASONING_PARSERS = {
    "openai_gptoss": ".harmony:HARMONY",
    "mistral": ".mistral:MISTRAL",
    "deepseek_r1": ".deepseek:R1",
    "qwen3": ".qwen3:QWEN3",
    "none": ".none:NONE",
}
