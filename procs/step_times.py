"""Where the time of steps goes, as the core sees it. It reads the clock twice a step."""

from ..ipc.reports import SECONDS, Histogram, HistogramCounts


class StepTimes:
    """Four histograms, in seconds."""

    def __init__(self) -> None:
        self._device = Histogram(SECONDS)
        self._waited = Histogram(SECONDS)
        self._masks = Histogram(SECONDS)
        self._host = Histogram(SECONDS)

    def answered(self, device_s: float, oldest_s: float, mask_wait_s: float = 0.0) -> None:
        """A result has come. `device_s`: how long the worker's forward pass took; `mask_wait_s`: how long it waited for
        masks besides; `oldest_s`: how long its plan was the oldest in flight. The rest was spent on the way and in the
        worker's Python."""
        self._device.observe(device_s)
        self._waited.observe(max(0.0, oldest_s - device_s - mask_wait_s))
        if mask_wait_s:
            self._masks.observe(mask_wait_s)

    def handled(self, num_steps: int, seconds: float) -> None:
        """So many results were applied, the next plans made and the outputs sent."""
        self._host.observe(seconds / num_steps)

    def report(self) -> dict[str, HistogramCounts]:
        """The histograms by their names in /metrics."""
        return {
            "step_time_seconds": self._device.report(),
            "step_wait_time_seconds": self._waited.report(),
            "step_mask_wait_time_seconds": self._masks.report(),
            "step_host_time_seconds": self._host.report(),
        }
