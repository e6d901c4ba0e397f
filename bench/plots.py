"""The figures of the benchmarks, as PNG files."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")  # no display
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter, ScalarFormatter

from .report import Row, percentile

_COLORS = ("#1f5fa8", "#c4501b", "#2e8540", "#7d4a9e", "#6b6b6b")
_STYLE: Any = {  # mypy: the keys are a long Literal
    "axes.grid": True,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "figure.dpi": 110,
    "font.size": 9,
    "grid.alpha": 0.3,
}


def distribution(
    path: Path, title: str, unit: str, values: Mapping[str, Sequence[float]], *, marks: Mapping[str, float]
) -> None:
    """For each name, the share of values larger than x, on two logarithmic axes, which show the tail."""
    with plt.rc_context(_STYLE):
        figure, axes = plt.subplots(figsize=(6.5, 3.6), layout="constrained")
        for color, (name, numbers) in zip(_COLORS, values.items(), strict=False):
            ordered = sorted(numbers)
            larger = [1 - i / len(ordered) for i in range(len(ordered))]
            axes.step(ordered, larger, where="post", color=color, label=name)
            axes.plot([percentile(ordered, 99)], [0.01], "o", color=color)
        axes.set(xscale="log", yscale="log", title=title, xlabel=unit, ylabel="share that is longer (dot: p99)")
        for name, x in marks.items():
            axes.axvline(x, color="black", linewidth=0.8, linestyle=":")
            axes.text(x, 1.0, f" {name}", rotation=90, va="top", ha="right", fontsize=8)
        axes.legend(frameon=False, loc="lower center")
        _save(figure, path)


def dots(
    path: Path, title: str, unit: str, values: Mapping[str, Sequence[float]], *, marks: Mapping[str, float]
) -> None:
    """A line for each name with a dot for each of its values."""
    with plt.rc_context(_STYLE):
        figure, axes = plt.subplots(figsize=(6.5, 1.5 + 0.3 * len(values)), layout="constrained")
        for line, numbers in enumerate(values.values()):
            axes.plot(numbers, [line] * len(numbers), "o", color=_COLORS[0], markersize=4, alpha=0.5)
        most = max(*marks.values(), *(max(numbers) for numbers in values.values()))
        axes.set(title=title, xlabel=unit, xlim=(0, 1.05 * most), ylim=(len(values) - 0.5, -0.5))
        axes.set_yticks(range(len(values)), list(values))
        for name, x in marks.items():
            axes.axvline(x, color="black", linewidth=0.8, linestyle=":")
            axes.text(x, -0.4, f" {name}", va="top", fontsize=8)
        _save(figure, path)


def panels(
    path: Path,
    title: str,
    x_label: str,
    xs: Sequence[float],
    lines: Mapping[str, Sequence[Row]],
    columns: Sequence[str],
    *,
    log: Sequence[str] = (),
) -> None:
    """A panel for each column with a line for each name: medians over `xs`, the range shaded.

    `lines`: name → a row for each x. `log`: columns on a logarithmic axis.
    """
    num_rows = -(-len(columns) // 2)
    with plt.rc_context(_STYLE):
        figure, grid = plt.subplots(
            num_rows, min(2, len(columns)), figsize=(8.5, 3.0 * num_rows), layout="constrained", squeeze=False
        )
        figure.suptitle(title)
        for place, column in zip(grid.flat, columns, strict=False):
            _panel(place, xs, lines, column)
            place.set(title=column, xlabel=x_label, yscale="log" if column in log else "linear")
            if column in log:
                place.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
                place.yaxis.set_major_formatter(ScalarFormatter())
                place.yaxis.set_minor_formatter(NullFormatter())
            else:
                place.set_ylim(bottom=0)
        for place in grid.flat[len(columns) :]:
            place.remove()
        grid.flat[0].legend(frameon=False)
        _save(figure, path)


def _panel(axes: Axes, xs: Sequence[float], lines: Mapping[str, Sequence[Row]], column: str) -> None:
    for color, marker, (name, rows) in zip(_COLORS, "os^Dv", lines.items(), strict=False):
        medians = [row.median(column) for row in rows]
        low = [min(row.figures[column]) for row in rows]
        high = [max(row.figures[column]) for row in rows]
        axes.plot(xs, medians, color=color, marker=marker, markersize=4, label=name)
        axes.fill_between(xs, low, high, color=color, alpha=0.15, linewidth=0)


def _save(figure: Figure, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    plt.close(figure)
