"""How evenly the ranks' experts are used, by the ranks' reports."""

from ...ipc.messages import ExpertLoad


class ExpertLoads:
    """A rank's reports are windows: what happened since the one before. Ranks run the same plans and report after the
    same steps, so the windows of equal `num_steps` belong together, of the ranks that share the experts of a layer."""

    def __init__(self, num_ranks: int, num_stages: int = 1) -> None:
        """num_ranks: of all stages; those of a stage follow each other."""
        self._size = num_ranks // num_stages
        self._totals = [0] * num_ranks
        self._sent_bytes = [0] * num_ranks
        self._windows: dict[int, ExpertLoad] = {}  # by rank, the last ones
        self.num_windows = 0  # that all ranks of a stage have reported
        self._by_layer: dict[int, list[list[int]]] = {}  # layer → for each rank the tokens of each expert

    def take(self, report: ExpertLoad) -> None:
        self._windows[report.rank] = report
        self._totals[report.rank] += sum(sum(_integers(tokens)) for tokens in report.tokens.values())
        self._sent_bytes[report.rank] += report.sent_bytes
        first = report.rank - report.rank % self._size
        windows = [self._windows[rank] for rank in range(first, first + self._size) if rank in self._windows]
        if len(windows) == self._size and len({window.num_steps for window in windows}) == 1:
            self.num_windows += 1
            self._by_layer |= {
                layer: [_integers(window.tokens[layer]) for window in windows] for layer in report.tokens
            }

    @property
    def tokens(self) -> tuple[int, ...]:
        """Of each rank, since its first report; empty before that."""
        return tuple(self._totals) if self._windows else ()

    @property
    def sent_bytes(self) -> tuple[int, ...]:
        """That others have read from each rank, since its first report; empty before that."""
        return tuple(self._sent_bytes) if self._windows else ()

    @property
    def imbalance(self) -> dict[int, float]:
        """Layer → the tokens of the busiest rank in relation to the mean rank's, in the last window of all ranks; 1:
        all ranks had as many."""
        found = {}
        for layer, ranks in self._by_layer.items():
            totals = [sum(experts) for experts in ranks]
            if any(totals):
                found[layer] = max(totals) * len(totals) / sum(totals)
        return found

    def of_experts(self, layer: int) -> list[int]:
        """The tokens of each expert in the last window, on whichever rank."""
        return [sum(experts) for experts in zip(*self._by_layer[layer], strict=True)]


def _integers(data: bytes) -> list[int]:
    return memoryview(data).cast("q").tolist()
