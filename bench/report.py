"""Shared by all benchmarks: repeated measurements, facts of the machine, a table and a JSON file."""

import datetime
import json
import os
import platform
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path

# Instruction sets that matrix products may use, as /proc/cpuinfo names them.
_INSTRUCTIONS = {"avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16", "amx_int8", "asimddp", "bf16", "i8mm"}


@dataclass
class Row:
    """One measured case: its figures, each measured several times."""

    name: str
    figures: dict[str, list[float]] = field(default_factory=dict)  # column, with its unit → one value per repetition

    def add(self, **values: float) -> None:
        """Adds the values of one repetition."""
        for column, value in values.items():
            self.figures.setdefault(column, []).append(value)

    def median(self, column: str) -> float:
        return statistics.median(self.figures[column])


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest of the values that at least `percent` % of them do not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, max(0, -(-int(len(ordered) * percent) // 100) - 1))]


def machine() -> dict[str, object]:
    """The machine and the versions of packages."""
    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [line.partition(":")[2].strip() for line in cpuinfo.read_text().splitlines() if "model name" in line]
        model = names[0] if names else model
    flags = set(cpuinfo.read_text().split()) if cpuinfo.exists() else set()
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "cpu": model,
        "instructions": sorted(flags & _INSTRUCTIONS),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(memory / 2**30, 1),
        "python": platform.python_version(),
        "torch": version("torch"),
        "transformers": version("transformers"),
        "load_before": [round(x, 2) for x in os.getloadavg()],
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
    }


def print_table(rows: Sequence[Row]) -> None:
    """Prints the median, smallest and largest value of each column."""
    columns = list(dict.fromkeys(column for row in rows for column in row.figures))
    cells = [["", *columns]]
    for row in rows:
        line = [row.name]
        for column in columns:
            values = row.figures.get(column)
            line.append(f"{statistics.median(values):.4g} ({min(values):.4g}–{max(values):.4g})" if values else "–")
        cells.append(line)
    widths = [max(len(line[i]) for line in cells) for i in range(len(cells[0]))]
    for line in cells:
        print(
            "  ".join(
                cell.rjust(w) if i else cell.ljust(w) for i, (cell, w) in enumerate(zip(line, widths, strict=True))
            )
        )


def write_json(
    path: Path, title: str, rows: Sequence[Row], facts: dict[str, object], settings: dict[str, object]
) -> None:
    """Writes all measured values with the machine and the settings."""
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {"title": title, "machine": facts, "settings": settings, "rows": [asdict(row) for row in rows]}
    path.write_text(json.dumps(content, indent=1) + "\n")


def repeat(times: int, *measures: Callable[[], None]) -> None:
    """Runs all measurements in turn, `times` times, so that noise affects all of them."""
    for _ in range(times):
        for measure in measures:
            measure()
