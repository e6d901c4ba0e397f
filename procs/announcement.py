"""The text that a launch prints when it is ready: the model, notes of its processes, the times of the start, and a
curl command to try."""

from collections.abc import Mapping, Sequence

from ..config.config import EngineConfig, Task
from ..config.cpus import show_cpus


def announcement(
    config: EngineConfig,
    notes: Sequence[str],
    marks: Sequence[tuple[str, float]],
    timings: Mapping[str, Mapping[str, float]],
    url: str | None,
    *,
    has_keys: bool,
) -> str:
    """`marks`: phases of the start with their ends, in seconds since its beginning. `timings`: the seconds of the parts
    of some phases. `url`: the api's address, if this launch has an api."""
    lines = [
        f"pagewire serves {config.served_model_names[0]} ({config.dtype}, context {config.max_model_len:,} tokens)"
    ]
    lines += [f"  {note}" for note in notes]
    if config.cpu_sets:
        lines.append(f"  ranks bound to CPUs {' | '.join(map(show_cpus, config.cpu_sets))}, see --cpu-bind")
    if config.invariance_warning is not None:
        lines.append(f"  {config.invariance_warning}")
    lines.append("start")
    before = 0.0
    for phase, at in marks:
        parts = ", ".join(f"{part} {seconds:.2f}" for part, seconds in timings.get(phase, {}).items())
        lines.append(f"  {at - before:6.2f} s  {phase}" + (f"  ({parts})" if phase in timings else ""))
        before = at
    lines.append(f"  {before:6.2f} s  total")
    if url is not None:
        model = config.served_model_names[0]
        key = ' -H "Authorization: Bearer $PAGEWIRE_API_KEY"' if has_keys else ""
        is_file = url.startswith("unix:")
        base = f"--unix-socket {url.removeprefix('unix:')} http://localhost" if is_file else url
        path, fields = _example(config.model.purpose.tasks)
        lines += [
            f"listening on {url} — try:",
            f"  curl -N {base}{path} -H 'Content-Type: application/json'{key} "
            f"""-d '{{"model": "{model}", {fields}}}'""",
        ]
    return "\n".join(lines)


def _example(tasks: Sequence[Task]) -> tuple[str, str]:
    """A path and the fields, in JSON, of a request that a model for these tasks answers."""
    if "generate" in tasks:
        messages = '"messages": [{"role": "user", "content": "Count from 1 to 10"}]'
        return "/v1/chat/completions", f'"stream": true, {messages}'
    if "embed" in tasks:
        return "/v1/embeddings", '"input": "Count from 1 to 10"'
    if "classify" in tasks:
        return "/classify", '"input": "Count from 1 to 10"'
    return "/v1/score", '"text_1": "How many?", "text_2": ["Ten", "Blue"]'
