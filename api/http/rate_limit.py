"""Rate limits of a key: requests and tokens a minute, each a token bucket.

A request takes its estimated tokens when it comes; when it has ended, the estimate is replaced by the actual number. So
a bucket may be in debt for a while, and over time no key gets more than its rate.
"""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import assert_never

from ...ipc.messages import ChatPrompt, IdsPrompt, PairPrompt, Submit, TextPrompt
from .http_error import HttpError

_BYTES_PER_TOKEN = 4  # in English; the actual number is settled at the end
_DEFAULT_OUTPUT = 256  # estimated tokens of output without max_tokens

Headers = list[tuple[bytes, bytes]]


class Bucket:
    """Holds `per_minute`, is full at first, and fills up in a minute."""

    def __init__(self, per_minute: int, clock: Callable[[], float]) -> None:
        self.per_minute = per_minute
        self._clock = clock
        self._level = float(per_minute)  # at `_at`; negative: a debt
        self._at = clock()
        self.taken = 0.0  # since others heard of it

    @property
    def level(self) -> float:
        """The amount that can be taken now."""
        now = self._clock()
        self._level = min(self.per_minute, self._level + (now - self._at) * self.per_minute / 60)
        self._at = now
        return self._level

    def change(self, per_minute: int) -> None:
        """Holds so many from now on. What was taken stays taken."""
        self._level = min(per_minute, self.level + per_minute - self.per_minute)
        self.per_minute = per_minute

    def take(self, amount: float) -> None:
        """A negative amount is given back."""
        self._level = min(self.per_minute, self.level - amount)
        self.taken += amount

    def adopt(self, level: float, taken: float) -> None:
        """Takes over the level that others agree on, which counts `taken`; what was taken later is not in it."""
        self.taken -= taken
        self._level = min(self.per_minute, level - self.taken)
        self._at = self._clock()

    def wait_s(self, amount: float) -> float:
        """Seconds until `amount` is there, or the bucket is full; 0: now."""
        return max(0.0, (min(amount, self.per_minute) - self.level) * 60 / self.per_minute)


class Hold:
    """A request that has paid for its estimated tokens; the endpoint sets the actual number before it ends."""

    num_tokens = 0  # of prompts and outputs


class Account:
    """The buckets of one key; without keys all requests have the same account."""

    def __init__(
        self,
        requests_per_minute: int | None = None,
        tokens_per_minute: int | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        self._requests: Bucket | None = None
        self._tokens: Bucket | None = None
        self.change(requests_per_minute, tokens_per_minute)

    def change(self, requests_per_minute: int | None, tokens_per_minute: int | None) -> None:
        """Other rates hold from now on. A rate that there was not begins with a full bucket."""
        self._requests = self._changed(self._requests, requests_per_minute)
        self._tokens = self._changed(self._tokens, tokens_per_minute)

    def _changed(self, bucket: Bucket | None, per_minute: int | None) -> Bucket | None:
        if bucket is None or per_minute is None:
            return None if per_minute is None else Bucket(per_minute, self._clock)
        bucket.change(per_minute)
        return bucket

    def take_request(self) -> None:
        """Counts a request. Raises HttpError 429, with the time to wait."""
        if self._requests is not None:
            _check(self._requests, 1, "requests")
            self._requests.take(1)

    def hold(self, submits: Sequence[Submit]) -> AbstractContextManager[Hold]:
        """Around serving `submits`. Raises HttpError 429, with the time to wait."""
        return self.hold_tokens(sum(map(estimated_tokens, submits)))

    @contextmanager
    def hold_tokens(self, estimate: int) -> Iterator[Hold]:
        """Around serving a request of about `estimate` tokens. Raises HttpError 429, with the time to wait."""
        hold, bucket = Hold(), self._tokens  # the rate may change meanwhile
        if bucket is None:
            yield hold
            return
        _check(bucket, estimate, "tokens")
        bucket.take(estimate)
        try:
            yield hold
        finally:
            bucket.take(hold.num_tokens - estimate)

    @property
    def buckets(self) -> dict[str, Bucket]:
        """Those that there are, by name: requests, tokens."""
        named = {"requests": self._requests, "tokens": self._tokens}
        return {name: bucket for name, bucket in named.items() if bucket is not None}

    def headers(self) -> Headers:
        """OpenAI's x-ratelimit headers."""
        found: Headers = []
        for name, bucket in self.buckets.items():
            found += [
                (f"x-ratelimit-limit-{name}".encode(), b"%d" % bucket.per_minute),
                (f"x-ratelimit-remaining-{name}".encode(), b"%d" % max(0, math.floor(bucket.level))),
                (f"x-ratelimit-reset-{name}".encode(), _duration(bucket.wait_s(bucket.per_minute))),
            ]
        return found


def estimated_tokens(submit: Submit) -> int:
    """Tokens of the prompt and all outputs, about."""
    match submit.prompt:
        case IdsPrompt(ids=ids):
            num_prompt = len(ids) // 4
        case TextPrompt(text=text):
            num_prompt = len(text) // _BYTES_PER_TOKEN + 1
        case ChatPrompt(messages=messages, tools=tools):
            num_prompt = (len(messages) + len(tools)) // _BYTES_PER_TOKEN + 1
        case PairPrompt(first=first, second=second):
            num_prompt = (len(first) + len(second)) // _BYTES_PER_TOKEN + 1
        case _:
            assert_never(submit.prompt)
    num_output = _DEFAULT_OUTPUT if submit.limits.max_tokens is None else submit.limits.max_tokens
    return num_prompt + submit.n * num_output


def _check(bucket: Bucket, amount: int, what: str) -> None:
    wait_s = bucket.wait_s(amount)
    if wait_s > 0:
        raise HttpError(
            429,
            f"The rate limit of {bucket.per_minute} {what} per minute is reached; try again in {wait_s:.1f} s.",
            code="rate_limit_exceeded",
            headers=((b"retry-after", b"%d" % math.ceil(wait_s)),),
        )


def _duration(seconds: float) -> bytes:
    """In OpenAI's format: 12ms, 1.5s, 6m0s."""
    if seconds < 1:
        return b"%dms" % math.ceil(seconds * 1000)
    minutes, rest = divmod(round(seconds, 1), 60)
    return f"{minutes:.0f}m{rest:g}s".encode() if minutes else f"{rest:g}s".encode()
