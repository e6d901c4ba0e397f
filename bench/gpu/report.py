"""The report: a JSON file with all results, and a table in Markdown."""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from .figures import Figure, Outcome

_SMOKE = "SMOKE: tiny sizes on a CPU, kernels in an interpreter. These numbers do not describe any GPU."


def as_json(outcomes: Sequence[Outcome], machine: Mapping[str, object], *, smoke: bool) -> str:
    def figure_of(figure: Figure) -> dict[str, object]:
        return {**asdict(figure), "verdict": figure.verdict(smoke=smoke)}

    parts = [
        {**asdict(outcome), "verdict": outcome.verdict(smoke=smoke), "figures": [*map(figure_of, outcome.figures)]}
        for outcome in outcomes
    ]
    title = _SMOKE if smoke else "GPU verification"
    return json.dumps({"title": title, "smoke": smoke, "machine": machine, "parts": parts}, indent=1) + "\n"


def as_markdown(outcomes: Sequence[Outcome], machine: Mapping[str, object], *, smoke: bool) -> str:
    """The machine, and a table of the figures."""
    facts = machine.get("device")
    name = facts.get("name", "no GPU") if isinstance(facts, dict) else "no GPU"
    lines = ["# SMOKE, not a measurement" if smoke else f"# {name}, {machine.get('date')}", ""]
    if smoke:
        lines += [_SMOKE, ""]
    told = {**(facts if isinstance(facts, dict) else {}), **{k: v for k, v in machine.items() if k != "device"}}
    lines += [", ".join(f"{key} {value}" for key, value in told.items()) + ".", ""]
    if not smoke:
        lines += ["Targets are for one H200 and bfloat16.", ""]
    lines += ["| part | | value | target | verdict |", "|---|---|---|---|---|"]
    for outcome in outcomes:
        for figure in outcome.figures:
            value = f"{figure.value:.4g} {figure.unit}".strip()
            verdict = figure.verdict(smoke=smoke)
            cells = (outcome.part, figure.name, value, figure.target, "" if verdict == "measured" else verdict)
            lines.append("| " + " | ".join(cells) + " |")
        why = outcome.failed or outcome.skipped
        if why:
            verdict = "failed" if outcome.failed else "skipped"
            lines.append(f"| {outcome.part} | {_cell(why)} | | | {verdict} |")
    counts = Counter(figure.verdict(smoke=smoke) for outcome in outcomes for figure in outcome.figures)
    broken = Counter("failed" if o.failed else "skipped" for o in outcomes if o.failed or o.skipped)
    seconds = sum(outcome.seconds for outcome in outcomes)
    lines += ["", f"Targets: {counts['met']} met, {counts['missed']} missed. Parts: {len(outcomes)}, of which"
              f" {broken['failed']} failed and {broken['skipped']} were skipped. {seconds:.0f} s.", ""]  # fmt: skip
    return "\n".join(lines)


def write(folder: Path, name: str, outcomes: Sequence[Outcome], machine: Mapping[str, object], *, smoke: bool) -> None:
    """Writes `name`.json and `name`.md."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.json").write_text(as_json(outcomes, machine, smoke=smoke))
    (folder / f"{name}.md").write_text(as_markdown(outcomes, machine, smoke=smoke))


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "/").split())
