"""What a step costs: a model of its milliseconds, learnt from every step.

    ms ≈ c0 + c1·rows + c2·context + c3·prefill + c4·pairs

with rows and their context (positions read) of those that compute one position, prefill the positions of the others,
and pairs the query–key pairs of their attention. The coefficients come from least squares over all steps with
exponential forgetting, so the model follows a machine that gets busier. They are solved from the normal equations,
which no rounding can drive apart, however long the service. Plain numbers in, plain numbers out: the scheduler that
asks it stays deterministic.
"""

from typing import NamedTuple

_FORGETTING = 0.995  # weight of the past at each step: a memory of some 200 steps
_RIDGE = 1e-2  # how much what was believed counts, in scaled steps
_SCALES = (1.0, 0.01, 1e-4, 1e-3, 1e-6)  # bring the features to one magnitude
_MIN_OBSERVED = 4  # steps with prefill before predictions are trusted


CAUTIOUS = 1 / 3
"""What share of guesses has to come true while nothing is known of their cost."""


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
        self._products = [[0.0] * n for _ in range(n)]  # sum of feature × feature, forgetting
        self._times = [0.0] * n  # sum of feature × ms, forgetting
        self.num_prefill_steps = 0  # observed steps that had prefill in them
        self._most_prefill = 0  # in one of them

    @property
    def is_ready(self) -> bool:
        """Whether its predictions can be trusted."""
        return self.num_prefill_steps >= _MIN_OBSERVED

    def observe(self, work: Work, ms: float) -> None:
        """A step of this work took `ms`."""
        x = [value * scale for value, scale in zip((1.0, *work), _SCALES, strict=True)]
        self._products = [
            [_FORGETTING * p + a * b for p, b in zip(row, x, strict=True)]
            for row, a in zip(self._products, x, strict=True)
        ]
        self._times = [_FORGETTING * t + a * ms for t, a in zip(self._times, x, strict=True)]
        self._solve()
        self.num_prefill_steps += work.prefill > 0
        self._most_prefill = max(self._most_prefill, work.prefill)

    def predict(self, work: Work) -> float:
        """Milliseconds. A coefficient that noise has made negative counts as zero."""
        x = [1.0, *work]
        return sum(max(0.0, c) * v * s for c, v, s in zip(self._coefficients, x, _SCALES, strict=True))

    def predict_more(self, work: Work) -> float:
        """Milliseconds that this work adds to a step that is made anyway."""
        return self.predict(work) - self.predict(NO_WORK)

    def break_even(self, work: Work) -> float:
        """The share of guessed tokens that must come true, so that computing them after `work` takes no longer than as
        many tokens more in steps of their own. Few rows share the weights that a step reads and may guess freely; for
        many each position has its price. `CAUTIOUS` until steps were seen."""
        work = Work(work.rows, work.context, 0, 0)
        ms = self.predict(work)
        more = self.predict(with_draft_tokens(work, work.rows)) - ms
        return min(0.95, max(0.1, more / ms)) if work.rows and more > 0 else CAUTIOUS

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

    def _solve(self) -> None:
        """The least squares coefficients, held back a little towards those believed before: what no step has told apart
        for long stays as it was. The matrix is symmetric and, with that, positive definite: no pivots are needed."""
        n = len(_SCALES)
        rows = [
            [*row, t + _RIDGE * c] for row, t, c in zip(self._products, self._times, self._coefficients, strict=True)
        ]
        for i in range(n):
            rows[i][i] += _RIDGE
        for i in range(n):
            for k in range(i + 1, n):
                factor = rows[k][i] / rows[i][i]
                rows[k] = [a - factor * b for a, b in zip(rows[k], rows[i], strict=True)]
        solved = [0.0] * n
        for i in reversed(range(n)):
            known = sum(rows[i][j] * solved[j] for j in range(i + 1, n))
            solved[i] = (rows[i][n] - known) / rows[i][i]
        self._coefficients = solved


def with_draft_tokens(work: Work, num: int) -> Work:
    """`work` whose rows computed `num` guessed positions more. Each reads as much as the one before it; nobody can tell
    beforehand how many there will be, so what is predicted is a step without them."""
    return work._replace(rows=work.rows + num, context=work.context + num * (work.context // max(1, work.rows)))


def with_chunk(work: Work, past: int, num: int) -> Work:
    """`work` and a chunk of `num` positions after `past` computed ones."""
    return work._replace(prefill=work.prefill + num, pairs=work.pairs + num * past + num * (num + 1) // 2)
