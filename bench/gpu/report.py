"""The report: a JSON file with all results, and a table in Markdown."""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from .figures import Figure, Outcome

_ESTIMATES = Path(__file__).resolve().parents[1] / "results" / "gpu_estimates.json"
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


def estimates_of(device: str, path: Path = _ESTIMATES) -> dict[str, float]:
    """The estimates for a device, by "part: figure"; device: as nvidia-smi names it. See `estimate.py`."""
    found = json.loads(path.read_text())["devices"] if path.exists() else {}
    return next((dict(figures) for name, figures in found.items() if name in device.replace("-", " ").split()), {})


def finished(path: Path, machine: Mapping[str, object]) -> dict[str, Outcome]:
    """The parts that a report has of the same commit and device, if they did not fail and were not skipped."""
    found = json.loads(path.read_text()) if path.exists() else {"machine": {}, "parts": []}
    if any(found["machine"].get(name) != machine.get(name) for name in ("commit", "torch", "triton")):
        return {}
    kept = {}
    for part in found["parts"]:
        if not part["failed"] and not part["skipped"]:
            fields = {name: part[name] for name in ("part", "title", "seconds")}
            figures = [Figure(**{k: v for k, v in each.items() if k != "verdict"}) for each in part["figures"]]
            kept[part["part"]] = Outcome(**fields, figures=tuple(figures))
    return kept


def as_markdown(
    outcomes: Sequence[Outcome],
    machine: Mapping[str, object],
    *,
    smoke: bool,
    estimates: Mapping[str, float] | None = None,
) -> str:
    """The machine, and a table of the figures. estimates: by "part: figure"."""
    estimates = estimates or {}
    facts = machine.get("device")
    name = facts.get("name", "no GPU") if isinstance(facts, dict) else "no GPU"
    lines = ["# SMOKE, not a measurement" if smoke else f"# {name}, {machine.get('date')}", ""]
    if smoke:
        lines += [_SMOKE, ""]
    known = {**(facts if isinstance(facts, dict) else {}), **{k: v for k, v in machine.items() if k != "device"}}
    lines += [", ".join(f"{key} {value}" for key, value in known.items()) + ".", ""]
    if not smoke:
        lines += ["Targets are for one H200 and bfloat16.", ""]
    lines += ["| part | | value | target | estimate | verdict |", "|---|---|---|---|---|---|"]
    for outcome in outcomes:
        for figure in outcome.figures:
            value = f"{figure.value:.4g} {figure.unit}".strip()
            verdict = figure.verdict(smoke=smoke)
            estimate = estimates.get(f"{outcome.part}: {figure.name}")
            estimated = "" if estimate is None else f"{estimate:.4g} {figure.unit}"
            told = "" if verdict == "measured" else verdict
            cells = (outcome.part, figure.name, value, figure.target, estimated, told)
            lines.append("| " + " | ".join(cells) + " |")
        why = outcome.failed or outcome.skipped
        if why:
            verdict = "failed" if outcome.failed else "skipped"
            lines.append(f"| {outcome.part} | {_cell(why)} | | | | {verdict} |")
    counts = Counter(figure.verdict(smoke=smoke) for outcome in outcomes for figure in outcome.figures)
    broken = Counter("failed" if o.failed else "skipped" for o in outcomes if o.failed or o.skipped)
    seconds = sum(outcome.seconds for outcome in outcomes)
    lines += ["", f"Targets: {counts['met']} met, {counts['missed']} missed. Parts: {len(outcomes)}, of which"
              f" {broken['failed']} failed and {broken['skipped']} were skipped. {seconds:.0f} s.", ""]  # fmt: skip
    return "\n".join(lines)


def write(
    folder: Path,
    name: str,
    outcomes: Sequence[Outcome],
    machine: Mapping[str, object],
    *,
    smoke: bool,
    estimates: Mapping[str, float] | None = None,
) -> None:
    """Writes `name`.json and `name`.md."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.json").write_text(as_json(outcomes, machine, smoke=smoke))
    (folder / f"{name}.md").write_text(as_markdown(outcomes, machine, smoke=smoke, estimates=estimates))


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "/").split())
