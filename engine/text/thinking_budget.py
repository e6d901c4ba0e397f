"""Bounds a model's reasoning: after so many tokens, the tag that ends reasoning is forced, token by token."""

from collections.abc import Sequence

from ...ipc.messages import Constraint
from .detokenize import IncrementalDetokenizer
from .tokenizer import Tokenizer


def opens_reasoning(text: str, starts: tuple[str, ...]) -> bool:
    """Whether a model whose prompt ends with `text` begins with reasoning."""
    return text.rstrip().endswith(starts)


class ThinkingBudget:
    """The reasoning of one output. It may begin at the output's start, and again right after it has ended."""

    def __init__(self, tokenizer: Tokenizer, constraint: Constraint, prompt_tail: str) -> None:
        assert constraint.thinking_budget is not None
        self._starts, self._ends = constraint.reasoning_starts, constraint.reasoning_ends
        self._end_ids = tokenizer.encode(self._ends[0], add_special_tokens=False) if self._ends else []
        self._num_left = constraint.thinking_budget
        self._words = IncrementalDetokenizer(tokenizer, skip_special_tokens=False)
        self._longest = max(map(len, self._ends), default=1)
        self._seen = ""  # end of the output, as long as a tag may be
        self._reasons = opens_reasoning(prompt_tail, self._starts)
        self._may_begin = not self._reasons
        self._num_forced = 0  # tokens of the end tag that were sampled

    @property
    def forced_id(self) -> int | None:
        """The only token that may be sampled next; None: any."""
        if not self._reasons or self._num_left > 0 or self._num_forced == len(self._end_ids):
            return None
        return self._end_ids[self._num_forced]

    def accept(self, ids: Sequence[int]) -> None:
        """Appends sampled tokens to the output."""
        for id in ids:
            self._num_forced = self._num_forced + 1 if id == self.forced_id else 0
            self._seen += self._words.push((id,))
            if self._reasons:
                self._num_left -= 1
                if any(end in self._seen for end in self._ends):
                    self._reasons, self._may_begin, self._seen, self._num_forced = False, True, "", 0
                self._seen = self._seen[-self._longest :]
            elif self._may_begin:
                begun = self._seen.lstrip()
                if begun.startswith(self._starts):
                    self._reasons, self._may_begin, self._seen = True, False, ""
                elif begun and not any(start.startswith(begun) for start in self._starts):
                    self._may_begin, self._seen = False, ""
            else:
                self._seen = ""
