"""The picture of a measured load: requests over time, and how times are distributed. matplotlib is in the extra
`bench`."""

from collections.abc import Sequence
from pathlib import Path

from ...errors import ConfigError
from .figures import METRICS, seconds_of
from .load import Outcome


def draw(path: Path, title: str, outcomes: Sequence[Outcome]) -> None:
    """Writes a picture, whose format the file's name says. Raises ConfigError."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError("Pictures need matplotlib: pip install 'pagewire[bench]'.") from error
    good = sorted((one for one in outcomes if not one.error), key=lambda one: one.start)
    figure = Figure(figsize=(10, 7), layout="constrained")
    figure.suptitle(title)
    grid = figure.add_gridspec(2, 2)
    timeline = figure.add_subplot(grid[0, :])
    first = good[0].start if good else 0.0
    for row, one in enumerate(good):
        at = one.start - first
        timeline.barh(row, one.ttft, left=at, height=1.0, color="#c9c9c9")
        timeline.barh(row, one.latency - one.ttft, left=at + one.ttft, height=1.0, color="#1f5fa8")
    timeline.set(title="requests (grey: until the first token)", xlabel="seconds", ylabel="request")
    for place, name in ((grid[1, 0], "ttft"), (grid[1, 1], "itl")):
        axes = figure.add_subplot(place)
        values = sorted(second * 1e3 for second in seconds_of(outcomes, name))
        axes.step(values, [(i + 1) / len(values) for i in range(len(values))], where="post", color="#1f5fa8")
        axes.set(title=METRICS[name], xlabel="ms", ylabel="share of values below", ylim=(0, 1.02))
        if values and values[0] > 0:
            axes.set_xscale("log")
        axes.grid(alpha=0.3)
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be written: {error}.") from error
