"""Beam search, for `LLM.beam_search` and for `use_beam_search` over HTTP.

Each step is a batch of requests for one token, one request a beam. A beam's prompt is its parent's prompt and one more
token, so it finds all KV of its parent in the prefix cache: full blocks are shared, the last one is copied.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter

MAX_BEAMS = 10


@dataclass(frozen=True, kw_only=True)
class BeamSearchParams:
    """The parameters of a search."""

    beam_width: int  # 1 to 10
    max_tokens: int
    ignore_eos: bool = False
    length_penalty: float = 1.0  # a beam's score is its log-probability / length ** length_penalty
    early_stopping: bool = False  # end as soon as `beam_width` beams have ended, even if others could become better


@dataclass
class BeamSearchSequence:
    """One beam."""

    tokens: list[int]  # prompt and output
    cum_logprob: float = 0.0  # of the output
    text: str = ""  # of the output
    finish_reason: str | None = None  # stop or length
    score: float = 0.0


@dataclass
class BeamSearchOutput:
    """The best beams of one prompt, best first."""

    sequences: list[BeamSearchSequence]


class BeamSearch:
    """The search for one prompt. The caller samples candidates for all `prompts` until there are none."""

    def __init__(self, prompt: Sequence[int], params: BeamSearchParams, ends: frozenset[int]) -> None:
        """`ends`: tokens that end a beam. Raises ValueError if `params` make no sense."""
        if not 1 <= params.beam_width <= MAX_BEAMS or params.max_tokens < 1 or not prompt:
            raise ValueError("beam_width must be 1 to 10, max_tokens at least 1, and the prompt not empty.")
        self._params = params
        self._ends = ends
        self._num_prompt = len(prompt)
        self._num_left = params.max_tokens  # steps
        self._beams = [BeamSearchSequence(list(prompt))]
        self._ended: list[BeamSearchSequence] = []

    @property
    def num_candidates(self) -> int:
        """How many of the best next tokens each prompt needs. Half of them may be end tokens."""
        return 2 * self._params.beam_width

    @property
    def prompts(self) -> list[list[int]]:
        """The open beams; empty when the search is over."""
        is_over = self._num_left == 0 or (self._params.early_stopping and len(self._ended) >= self._params.beam_width)
        return [] if is_over else [beam.tokens for beam in self._beams]

    def take(self, candidates: Sequence[Mapping[int, float]]) -> None:
        """`candidates`: for each of `prompts`, the log-probabilities of its candidates for the next token."""
        grown = []
        for beam, following in zip(self._beams, candidates, strict=True):
            for token, logprob in following.items():
                new = BeamSearchSequence([*beam.tokens, token], beam.cum_logprob + logprob)
                if token in self._ends:
                    new.finish_reason = "stop"
                    self._ended.append(new)
                else:
                    grown.append(new)
                length = len(new.tokens) - self._num_prompt - (new.finish_reason == "stop")
                new.score = new.cum_logprob / float(max(1, length) ** self._params.length_penalty)
        self._beams = sorted(grown, key=attrgetter("score"), reverse=True)[: self._params.beam_width]
        self._num_left -= 1

    def output(self) -> BeamSearchOutput:
        """The best of the beams that have ended and those that were cut at `max_tokens`."""
        for beam in self._beams:
            beam.finish_reason = "length"
        best = sorted(self._ended + self._beams, key=attrgetter("score"), reverse=True)
        return BeamSearchOutput(best[: self._params.beam_width])
