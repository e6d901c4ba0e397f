"""Beam search over an `LLM`: `LLM.beam_search`.

Each step is one batch of requests that draw one token, a beam each. A beam's prompt is its parent's prompt and one
token more, so it finds all KV of its parent in the prefix cache: full blocks are shared, the last one is copied.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, kw_only=True)
class BeamSearchParams:
    """How wide and how long to search."""

    beam_width: int  # 1 to 10
    max_tokens: int
    ignore_eos: bool = False
    length_penalty: float = 1.0  # a beam's score is its log-probability / length ** length_penalty


@dataclass
class BeamSearchSequence:
    """One beam."""

    tokens: list[int]  # prompt and output
    cum_logprob: float = 0.0  # of the output
    text: str = ""  # of the output
    finish_reason: str | None = None  # stop or length


@dataclass
class BeamSearchOutput:
    """The best beams of one prompt, best first."""

    sequences: list[BeamSearchSequence]


class Candidate(Protocol):
    """What is read of a candidate token."""

    @property
    def logprob(self) -> float:
        """Natural log."""


Expand = Callable[[list[list[int]], int], Sequence[Mapping[int, Candidate]]]
"""`expand(prompts, num)`: of each prompt the candidates for its next token, the `num` best among them."""


def search(prompt: Sequence[int], params: BeamSearchParams, eos: frozenset[int], expand: Expand) -> BeamSearchOutput:
    """One prompt. Raises ValueError if `params` make no sense."""
    if not 1 <= params.beam_width <= 10 or params.max_tokens < 1 or not prompt:
        raise ValueError("beam_width must be 1 to 10, max_tokens at least 1, and the prompt not empty.")
    ends = frozenset() if params.ignore_eos else eos

    def score(beam: BeamSearchSequence) -> float:
        length = len(beam.tokens) - len(prompt) - (beam.finish_reason == "stop")
        return beam.cum_logprob / float(max(1, length) ** params.length_penalty)

    beams, ended = [BeamSearchSequence(list(prompt))], []
    for _ in range(params.max_tokens):
        grown = []
        for beam, candidates in zip(beams, expand([b.tokens for b in beams], 2 * params.beam_width), strict=True):
            for token, candidate in candidates.items():
                new = BeamSearchSequence([*beam.tokens, token], beam.cum_logprob + candidate.logprob)
                if token in ends:
                    new.finish_reason = "stop"
                    ended.append(new)
                else:
                    grown.append(new)
        beams = sorted(grown, key=score, reverse=True)[: params.beam_width]
        if not beams:
            break
    for beam in beams:
        beam.finish_reason = "length"
    return BeamSearchOutput(sorted(ended + beams, key=score, reverse=True)[: params.beam_width])
