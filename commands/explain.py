"""`pagewire serve --explain`: every setting as it was resolved, why it is what it is, and the memory that follows.

The reasons repeat what `resolve` decides by; a test finds a setting that was changed without one.
"""

from collections.abc import Mapping

import msgspec

from ..config.config import Config, EngineConfig, MachineFacts, ModelFacts

_RESOLVED = {
    "model": "model_path",
    "served_model_name": "served_model_names",
    "threads": "num_threads",
    "api_key": "api_keys",
    "admin_api_key": "admin_keys",
}  # setting → what it is called in EngineConfig, where that is something else
_WIDE = 32  # characters of a value; longer ones stand out of their column
# Decided, but not settings.
_BEYOND = ("arithmetic", "batch_invariance", "block_size", "vocab_size", "eos_token_ids", "sampling", "purpose")
_INVARIANCE = {
    "exact": "no bit of an answer depends on what else is served",
    "float32": "what else is served shows in rounding errors of float32 only",
    "none": "roundings to 16 or 8 bits make tokens depend on what else is served",
}


def explain(
    config: Config, engine: EngineConfig, model: ModelFacts, machine: MachineFacts, said: Mapping[str, str]
) -> str:
    """A line for each setting. `said`: where a setting was made that was (see `flags.read_settings`)."""
    rows = [
        (name.replace("_", "-"), value, reason)
        for name, value, reason in settings(config, engine, model, machine, said)
    ]
    names = max(len(name) for name, _, _ in rows)
    values = max(len(value) for _, value, _ in rows if len(value) <= _WIDE)
    return "\n".join(f"{name:<{names}}  {value:<{values}}  {reason}" for name, value, reason in rows)


def settings(
    config: Config, engine: EngineConfig, model: ModelFacts, machine: MachineFacts, said: Mapping[str, str]
) -> list[tuple[str, str, str]]:
    """(name, value, reason) of each setting and of what follows from them."""
    rows = []
    for name in (*Config.__struct_fields__, *_BEYOND):
        value = getattr(engine, _RESOLVED.get(name, name), getattr(config, name, None))
        if name in ("api_key", "admin_api_key"):  # a log is no place for keys
            assert isinstance(value, tuple)
            value = f"{len(value)} of them" if value else None
        reason = said.get(name) or _reason(name, config, engine, model, machine) or "default"
        rows.append((name, shown(value), reason))
    return rows


# Why a setting that nobody made is what it is, where the reason is always the same.
_ALWAYS = {
    "model": "the demo model that ships with pagewire",
    "served_model_name": "the model's own name",
    "max_model_len": "what the model declares",
    "kv_cache_memory": "from the memory that is free; see below",
    "kv_cache_dtype": "as dtype",
    "tool_call_parser": "what the chat template shows",
    "reasoning_parser": "what the chat template shows",
    "vocab_size": "the model's",
    "eos_token_ids": "the model's",
    "sampling": "what the model's authors recommend, where a request does not say",
    "purpose": "what the checkpoint's files say",
}


def _reason(name: str, config: Config, engine: EngineConfig, model: ModelFacts, machine: MachineFacts) -> str | None:
    """Why a setting that nobody made is what it is; None: its default is a constant."""
    on_cpu = engine.device == "cpu" or not machine.has_gpu
    place = "a CPU" if on_cpu else "a GPU"
    match name:
        case "dtype":
            return _dtype_reason(engine, model, machine, on_cpu=on_cpu)
        case "device":
            return (
                "there is an NVIDIA device" if machine.has_gpu else "there is no NVIDIA device that this torch can use"
            )
        case "max_num_batched_tokens" if engine.purpose.is_encoder:
            return f"the value for an encoder on {place}, or the longest text, which is read at once"
        case "enable_prefix_caching" if engine.purpose.is_encoder:
            return "the model keeps nothing of what it has read"
        case "max_num_batched_tokens" | "block_size":
            return f"the value for {place}"
        case "gpu_memory_utilization" if on_cpu:
            return "default; not used on a CPU"
        case "cpu_kernels" if not on_cpu:
            return "default; not used on a GPU"
        case "cpu_kernels":
            return "there is a C compiler" if machine.has_compiler else "there is no C compiler (gcc or clang)"
        case "arithmetic":
            return "what the C kernels compute in" if engine.arithmetic != engine.dtype else "as dtype"
        case "batch_invariance":
            return _INVARIANCE[engine.batch_invariance]
        case "threads":
            ranks = f", shared by {engine.tensor_parallel_size} ranks" if engine.tensor_parallel_size > 1 else ""
            return f"one for each of {machine.num_cores} cores that may be used{ranks}"
        case _:
            return _ALWAYS.get(name)


def _dtype_reason(engine: EngineConfig, model: ModelFacts, machine: MachineFacts, *, on_cpu: bool) -> str:
    if engine.dtype == model.dtype:
        return "the checkpoint's"
    if engine.dtype == "float32" and engine.cpu_kernels == "compiled" and model.is_native:
        return f"what a CPU computes in; the matrices stay {'bfloat16' if model.dtype == 'bfloat16' else 'float32'}"
    if engine.dtype == "float32":
        return f"what a CPU computes in, and there is memory enough to widen the checkpoint's {model.dtype}"
    if on_cpu and model.dtype == "bfloat16":
        return "there is too little memory to widen the checkpoint"
    return f"as many bits as the checkpoint's {model.dtype}, with its own range"


def shown(value: object) -> str:
    """A setting's value for a person."""
    match value:
        case None | ():
            return "-"
        case bool():
            return "yes" if value else "no"
        case tuple():
            return " ".join(map(str, value))
        case float():
            return f"{value:g}"
        case msgspec.Struct():
            return " ".join(f"{field}={shown(getattr(value, field))}" for field in value.__struct_fields__)
        case _:
            return str(value)
