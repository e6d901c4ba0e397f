"""The scheduler's counters."""

from collections import Counter

from ...ipc.reports import POWERS, Histogram
from .prefix import Found


class Counters:
    """Running totals since the start."""

    def __init__(self) -> None:
        self.num_preemptions = 0
        self.num_regime_changes = 0  # requests that were computed again because they got longer than their regime
        self.num_out_of_memory = 0  # steps that the device had no memory for
        self.num_taken_back = 0  # preemptions of constrained requests whose masks took too long
        self.num_mended = 0  # how often the counts of rows and blocks were wrong while no request was open
        self.num_failed_calls = 0  # of the runner plugin
        self.num_slow_calls = 0
        self.num_prompt_tokens = 0
        self.num_cached_tokens = 0
        self.num_output_tokens = 0
        self.num_drafts = 0  # rows of steps that had draft tokens
        self.num_draft_tokens = 0
        self.num_accepted_tokens = 0  # of them, those that were accepted
        # What steps read of the device's memory, as far as the core knows it.
        self.num_passes = 0
        self.num_expert_passes = 0.0  # each counts as the share of a layer's experts that its tokens choose, expected
        self.num_pages_read = 0.0  # of KV
        self.expert_share = 0.0  # of a layer's experts, that one token chooses; who knows the model sets it
        self.step_decode_rows = Histogram(POWERS)
        self.step_prompt_tokens = Histogram(POWERS)
        self.step_tokens = Histogram(POWERS)

        # Found tokens by the group that lacked what more would need (-1: none), and the tokens behind them that the
        # full group had.
        self.hits_by_group: Counter[int] = Counter()
        self.lost_by_group: Counter[int] = Counter()

    def found(self, found: Found) -> None:
        """A request is admitted with this prefix."""
        limit = -1 if found.limit is None else found.limit
        self.hits_by_group[limit] += found.num
        self.lost_by_group[limit] += found.num_lost

    def passed(self, num_tokens: int, num_pages: float) -> None:
        """A step has computed so many positions, and read the KV in so many pages."""
        self.num_passes += 1
        self.num_expert_passes += 1 - (1 - self.expert_share) ** num_tokens  # as if each expert were as likely
        self.num_pages_read += num_pages

    def planned(self, num_decodes: int, num_others: int) -> None:
        """A plan was sent: rows that compute one position, and the positions of the others."""
        self.step_decode_rows.observe(num_decodes)
        self.step_prompt_tokens.observe(num_others)
        self.step_tokens.observe(num_decodes + num_others)
