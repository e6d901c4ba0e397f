"""Where the time of steps goes, as the core sees it. Two looks at the clock a step."""

from ..ipc.reports import SECONDS, Histogram, HistogramCounts


class StepTimes:
    """Three histograms, in seconds."""

    def __init__(self) -> None:
        self._device = Histogram(SECONDS)
        self._waited = Histogram(SECONDS)
        self._host = Histogram(SECONDS)

    def answered(self, device_s: float, oldest_s: float) -> None:
        """A result has come. `device_s`: what the worker's pass took; `oldest_s`: how long its plan was the oldest in
        flight. What is left of that was spent on the way and by the worker's own Python."""
        self._device.observe(device_s)
        self._waited.observe(max(0.0, oldest_s - device_s))

    def handled(self, num_steps: int, seconds: float) -> None:
        """So many results were applied, the next plans made and the news told."""
        self._host.observe(seconds / num_steps)

    def report(self) -> dict[str, HistogramCounts]:
        """By their names in /metrics."""
        return {
            "step_time_seconds": self._device.report(),
            "step_wait_time_seconds": self._waited.report(),
            "step_host_time_seconds": self._host.report(),
        }
