"""`pagewire serve --explain`: every setting as it was resolved, and the reason.

The reasons repeat what `resolve` decides by; a test finds a setting that was changed without one.
"""

from collections.abc import Mapping

import msgspec

from ..config.config import Config, EngineConfig, MachineFacts, ServerConfig
from ..config.cpus import show_cpus
from ..config.flags import SETTINGS, get_setting

_WIDE = 32  # characters of a value; longer ones do not widen the column
# Decided, but not settings: of the engine, and of the model.
_OF_ENGINE = ("arithmetic", "batch_invariance", "block_size")
_OF_MODEL = ("vocab_size", "eos_token_ids", "sampling", "purpose")
_INVARIANCE = {
    "exact": "no bit of an answer depends on what else is served",
    "float32": "what else is served shows in rounding errors of float32 only",
    "none": "roundings to 16 or 8 bits make tokens depend on what else is served",
}


def explain(config: Config, server: ServerConfig, machine: MachineFacts, said: Mapping[str, str]) -> str:
    """A line for each setting. `said`: the source of each setting that was made (see `flags.read_settings`)."""
    rows = [(name.replace("_", "-"), value, why) for name, value, why in settings(config, server, machine, said)]
    names = max(len(name) for name, _, _ in rows)
    values = max(len(value) for _, value, _ in rows if len(value) <= _WIDE)
    return "\n".join(f"{name:<{names}}  {value:<{values}}  {reason}" for name, value, reason in rows)


def settings(
    config: Config, server: ServerConfig, machine: MachineFacts, said: Mapping[str, str]
) -> list[tuple[str, str, str]]:
    """(name, value, reason) of each setting and of what follows from them."""
    rows = []
    for name in (*SETTINGS, *_OF_ENGINE, *_OF_MODEL):
        reason = said.get(name) or _reason(name, server.engine, machine) or "default"
        rows.append((name, shown(_value(name, config, server)), reason))
    return rows


def _value(name: str, config: Config, server: ServerConfig) -> object:
    engine, http = server.engine, server.http
    match name:
        case "model":
            return engine.model.path
        case "served_model_name":
            return engine.served_model_names
        case "threads":
            return engine.num_threads
        case "cpu_bind":
            return " | ".join(map(show_cpus, engine.cpu_sets)) or "none"
        case "cpu_kernels":
            return engine.cpu_level or engine.kernels
        case "api_key" | "admin_api_key":  # a log is no place for keys
            num = len(http.api_keys if name == "api_key" else http.admin_keys)
            return f"{num} of them" if num else None
        case _ if name in _OF_MODEL:
            return getattr(engine.model, name)
        case _ if name in _OF_ENGINE or SETTINGS[name].section == "engine":
            return getattr(engine, name)
        case _ if SETTINGS[name].section == "listen":
            return getattr(http.listen, name)
        case _:
            return get_setting(config, name)


# Reasons that do not depend on the machine or the model.
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
    "sampling": "the values that the model's authors recommend, for requests that do not set them",
    "purpose": "what the checkpoint's files say",
}


def _reason(name: str, engine: EngineConfig, machine: MachineFacts) -> str | None:
    """Why a setting that was not made has this value; None: its default is a constant."""
    on_cpu = engine.device == "cpu" or not machine.has_gpu
    place = "a CPU" if on_cpu else "a GPU"
    match name:
        case "dtype":
            return _dtype_reason(engine, on_cpu=on_cpu)
        case "device":
            return (
                "there is an NVIDIA device" if machine.has_gpu else "there is no NVIDIA device that this torch can use"
            )
        case "max_num_batched_tokens" if engine.model.purpose.is_encoder:
            return f"the value for an encoder on {place}, or the longest text, which is read at once"
        case "enable_prefix_caching" if engine.model.purpose.is_encoder:
            return "the model keeps nothing of what it has read"
        case "max_num_batched_tokens" | "block_size":
            return f"the value for {place}"
        case "gpu_memory_utilization" if on_cpu:
            return "default; not used on a CPU"
        case "cpu_kernels" if not on_cpu:
            return "default; not used on a GPU"
        case "cpu_kernels":
            return engine.no_cpu_level or f"the best of those that work here: {', '.join(machine.usable_levels)}"
        case "arithmetic":
            return "what the C kernels compute in" if engine.arithmetic != engine.dtype else "as dtype"
        case "batch_invariance":
            return _INVARIANCE[engine.batch_invariance]
        case "cpu_bind":
            return _bind_reason(engine, machine, on_cpu=on_cpu)
        case "threads":
            ranks = f", shared by {engine.num_ranks} ranks" if engine.num_ranks > 1 else ""
            return f"one for each of {machine.num_cores} cores that may be used{ranks}"
        case _:
            return _ALWAYS.get(name)


def _bind_reason(engine: EngineConfig, machine: MachineFacts, *, on_cpu: bool) -> str:
    num_ranks = engine.num_ranks * engine.data_parallel_size
    if not on_cpu:
        return "default; not used on a GPU"
    if engine.cpu_sets:
        nodes = f"{len(machine.numa_nodes)} NUMA node{'s' * (len(machine.numa_nodes) != 1)}"
        return f"the CPUs of {nodes}, shared by {num_ranks} ranks"
    return "there is one rank" if num_ranks == 1 else f"there are fewer usable cores than the {num_ranks} ranks"


def _dtype_reason(engine: EngineConfig, *, on_cpu: bool) -> str:
    checkpoint = engine.model.checkpoint_dtype
    if engine.dtype == checkpoint:
        return "the checkpoint's"
    if engine.dtype == "float32" and engine.kernels == "compiled" and engine.model.is_native:
        return f"what a CPU computes in; the matrices stay {'bfloat16' if checkpoint == 'bfloat16' else 'float32'}"
    if engine.dtype == "float32":
        return f"what a CPU computes in, and there is memory enough to widen the checkpoint's {checkpoint}"
    if not on_cpu and checkpoint == "float32":
        return "what the GPU's tensor cores multiply; --dtype float32 keeps the checkpoint's, slower"
    if on_cpu and checkpoint == "bfloat16":
        return "there is too little memory to widen the checkpoint"
    return f"as many bits as the checkpoint's {checkpoint}, with its own range"


def shown(value: object) -> str:
    """A setting's value as the user reads it."""
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
