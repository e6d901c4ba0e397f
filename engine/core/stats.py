"""What the scheduler counts."""


class Counters:
    """Running totals since the start."""

    def __init__(self) -> None:
        self.num_preemptions = 0
        self.num_prompt_tokens = 0
        self.num_cached_tokens = 0
        self.num_output_tokens = 0
        self.num_drafts = 0  # how often a row's next tokens were guessed
        self.num_draft_tokens = 0  # guesses
        self.num_accepted_tokens = 0  # of them, those that were drawn
