"""What a step costs: a model of its milliseconds, learnt from the steps that ran.

    ms ≈ c0 + c1·rows + c2·context + c3·prefill + c4·pairs

`rows` are those that compute one position, `context` the positions that they read, `prefill` the positions of the other
rows, and `pairs` the query–key pairs of their attention. The coefficients come from least squares over all steps with
exponential forgetting, so the model follows a machine that gets busier. They are solved from the normal equations, so
rounding errors do not add up, however long the service. The model is deterministic, as the scheduler must be.
"""

from typing import NamedTuple

_FORGETTING = 0.995  # weight of the past at each step: a memory of some 200 steps
_RIDGE = 1e-2  # weight of the coefficients before, in scaled steps
_SCALES = (1.0, 0.01, 1e-4, 1e-3, 1e-6)  # bring the features to one magnitude
_MIN_OBSERVED = 4  # steps with prefill before predictions are trusted


CAUTIOUS = 1 / 3
"""Share of draft tokens that must be accepted while nothing is known of their cost."""


class Work(NamedTuple):
    """What a step computes, as the model sees it."""

    rows: int  # that compute one position
    context: int  # positions that they read
    prefill: int  # positions of the other rows
    pairs: int  # query–key pairs of their attention


NO_WORK = Work(0, 0, 0, 0)


class CostModel:
    """Learns from steps that ran; predicts other steps."""

    def __init__(self) -> None:
        n = len(_SCALES)
        self._coefficients = [0.0] * n
        self._products = [[0.0] * n for _ in range(n)]  # sum of feature × feature, forgetting
        self._times = [0.0] * n  # sum of feature × ms, forgetting
        self.num_prefill_steps = 0  # observed steps that had prefill in them
        self._most_prefill = 0  # in one of them

    @property
    def is_ready(self) -> bool:
        """It has seen enough steps to predict others."""
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
        """Milliseconds that this work adds to a step."""
        return self.predict(work) - self.predict(NO_WORK)

    def of_request(self, num_prompt: int, num_output: int) -> tuple[float, float]:
        """Milliseconds that a request takes alone: of its prompt, and of so many tokens. Until enough steps were seen,
        one for each position and token."""
        if not self.is_ready:
            return float(num_prompt), float(num_output)
        prompt_ms = self.predict(with_chunk(NO_WORK, 0, num_prompt))
        return prompt_ms, num_output * self.predict(Work(1, num_prompt + num_output // 2, 0, 0))

    def of_rows(self) -> tuple[float, float]:
        """Milliseconds of a row, and of each position that it reads, in a step of rows that compute one position. Every
        row costs the same until the model has seen enough."""
        of_row, of_position = (max(0.0, c) * s for c, s in zip(self._coefficients[1:3], _SCALES[1:3], strict=True))
        return (of_row, of_position) if self.is_ready and of_row + of_position > 0 else (1.0, 0.0)

    def break_even(self, work: Work) -> float:
        """The share of draft tokens that must be accepted, so that computing them with `work` takes no longer than
        sampling as many tokens in steps of their own. Beside few rows, whose step is the time of reading the weights, a
        draft token costs little; beside many it costs what any position does. `CAUTIOUS` until steps were seen."""
        work = Work(work.rows, work.context, 0, 0)
        ms = self.predict(work)
        more = self.predict(with_draft_tokens(work, work.rows)) - ms
        return min(0.95, max(0.1, more / ms)) if work.rows and more > 0 else CAUTIOUS

    def longest_chunk(self, beside: Work, past: int, target_ms: float, limit: int) -> int:
        """The most positions of one row, `past` of it computed, that keep a step with `beside` below `target_ms`.

        Never more than twice the most that was observed: far from its data the model is not reliable.
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
        """The least squares coefficients, pulled a little towards those before: a coefficient that recent steps do not
        determine stays as it was. This also makes the symmetric matrix positive definite, so no pivots are needed."""
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
    """`work` whose rows computed `num` draft tokens in addition. Each reads as much as an average row. Their number is
    known only afterwards, so predictions are of steps without them."""
    return work._replace(rows=work.rows + num, context=work.context + num * (work.context // max(1, work.rows)))


def with_chunk(work: Work, past: int, num: int) -> Work:
    """`work` and a chunk of `num` positions after `past` computed ones."""
    return work._replace(prefill=work.prefill + num, pairs=work.pairs + num * past + num * (num + 1) // 2)
