"""What a step costs: a model of its milliseconds, learnt from every step.

    ms ≈ c0 + c1·rows + c2·context + c3·prefill + c4·pairs

with rows and their context (positions read) of those that compute one position, prefill the positions of the others,
and pairs the query–key pairs of their attention. The coefficients come from recursive least squares with forgetting
(e.g. Haykin, Adaptive Filter Theory, ch. 10), so the model follows a machine that gets busier. Plain numbers in, plain
numbers out: the scheduler that asks it stays deterministic.
"""

from typing import NamedTuple

_FORGETTING = 0.995  # weight of the past at each step: a memory of some 200 steps
_PRIOR = 1e4  # variance of the unknown coefficients before the first step
_SCALES = (1.0, 0.01, 1e-4, 1e-3, 1e-6)  # bring the features to one magnitude
_MIN_OBSERVED = 4  # steps with prefill before predictions are trusted


class Work(NamedTuple):
    """What a step computes."""

    rows: int  # that compute one position
    context: int  # positions that they read
    prefill: int  # positions of the other rows
    pairs: int  # query–key pairs of their attention


NO_WORK = Work(0, 0, 0, 0)


class CostModel:
    """Learns from steps that ran; predicts steps that might."""

    def __init__(self) -> None:
        n = len(_SCALES)
        self._coefficients = [0.0] * n
        self._covariance = [[_PRIOR if i == j else 0.0 for j in range(n)] for i in range(n)]
        self.num_prefill_steps = 0  # observed steps that had prefill in them
        self._most_prefill = 0  # in one of them

    @property
    def is_ready(self) -> bool:
        """Whether its predictions can be trusted."""
        return self.num_prefill_steps >= _MIN_OBSERVED

    def observe(self, work: Work, ms: float) -> None:
        """A step of this work took `ms`."""
        x = [1.0, *work]
        x = [value * scale for value, scale in zip(x, _SCALES, strict=True)]
        p = self._covariance
        px = [sum(a * b for a, b in zip(row, x, strict=True)) for row in p]
        gain_of = _FORGETTING + sum(a * b for a, b in zip(x, px, strict=True))
        error = ms - sum(c * v for c, v in zip(self._coefficients, x, strict=True))
        gain = [value / gain_of for value in px]
        self._coefficients = [c + g * error for c, g in zip(self._coefficients, gain, strict=True)]
        # Directions that are not excited must not blow up while everything is forgotten.
        self._covariance = [
            [min(_PRIOR, max(-_PRIOR, (p[i][j] - gain[i] * px[j]) / _FORGETTING)) for j in range(len(x))]
            for i in range(len(x))
        ]
        self.num_prefill_steps += work.prefill > 0
        self._most_prefill = max(self._most_prefill, work.prefill)

    def predict(self, work: Work) -> float:
        """Milliseconds. A coefficient that noise has made negative counts as zero."""
        x = [1.0, *work]
        return sum(max(0.0, c) * v * s for c, v, s in zip(self._coefficients, x, _SCALES, strict=True))

    def predict_more(self, work: Work) -> float:
        """Milliseconds that this work adds to a step that is made anyway."""
        return self.predict(work) - self.predict(NO_WORK)

    def longest_chunk(self, beside: Work, past: int, target_ms: float, limit: int) -> int:
        """The most positions of one row, `past` of it computed, that keep a step with `beside` below `target_ms`.

        Never more than twice what was ever observed: far from its data the model is only a guess.
        """
        low, high = 0, min(limit, 2 * self._most_prefill)
        while low < high:
            num = (low + high + 1) // 2
            if self.predict(with_chunk(beside, past, num)) <= target_ms:
                low = num
            else:
                high = num - 1
        return low


def with_chunk(work: Work, past: int, num: int) -> Work:
    """`work` and a chunk of `num` positions after `past` computed ones."""
    return work._replace(prefill=work.prefill + num, pairs=work.pairs + num * past + num * (num + 1) // 2)
