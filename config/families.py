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
    "gemma4": ".gemma4:GEMMA4",
    "glm45": ".glm:GLM45",
    "glm47": ".glm:GLM47",
    "minimax_m2": ".minimax:M2",
    "seed_oss": ".seed_oss:SEED_OSS",
    "qwen3_coder": ".qwen3_coder:QWEN3_CODER",
    "lfm2": ".lfm2:LFM2",
    "kimi_k2": ".kimi_k2:K2",
    "nemotron_json": ".nemotron:NEMOTRON",
    "granite": ".granite:GRANITE",
    "hermes": ".hermes:HERMES",
    "granite4": ".hermes:HERMES",
    "ernie45": ".hermes:HERMES",
    "llama3_json": ".llama3_json:LLAMA3_JSON",
    "pythonic": ".pythonic:PYTHONIC",
    "none": ".none:NONE",
}
REASONING_PARSERS = {
    "openai_gptoss": ".harmony:HARMONY",
    "mistral": ".mistral:MISTRAL",
    "deepseek_r1": ".deepseek:R1",
    "gemma4": ".gemma4:GEMMA4",
    "glm45": ".glm:GLM45",
    "minimax_m2": ".minimax:M2",
    "seed_oss": ".seed_oss:SEED_OSS",
    "kimi_k2": ".kimi_k2:K2",
    "kimi_vl": ".kimi_k2:TRIANGLES",
    "granite": ".granite:GRANITE",
    "ernie45": ".ernie:ERNIE45",
    "qwen3": ".qwen3:QWEN3",
    "none": ".none:NONE",
}
