"""Limits of requests and tokens per minute, by the test's clock, and with OpenAI's client."""

from typing import Any

import openai
import pytest
from harness import Client, FakeEngine, make_app, request, run
from msgspec.structs import replace
from served import Served

from pagewire.api.http.http_error import HttpError
from pagewire.api.http.rate_limit import Account, Bucket, estimated_tokens
from pagewire.config.access import ApiKey
from pagewire.config.config import Purpose
from pagewire.ipc.messages import (
    ChatPrompt,
    IdsPrompt,
    Limits,
    PairPrompt,
    Sampling,
    Submit,
    TextPrompt,
    TextSpec,
    ids_to_bytes,
)

SUBMIT = Submit(1, 1, IdsPrompt(ids_to_bytes([1] * 30)), Sampling(), Limits(max_tokens=20), TextSpec())


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def headers(account: Account) -> dict[str, str]:
    return {name.decode().removeprefix("x-ratelimit-"): value.decode() for name, value in account.headers()}


def test_a_bucket_fills_steadily() -> None:
    clock = Clock()
    bucket = Bucket(60, clock)
    bucket.take(60)
    assert bucket.level == 0 and bucket.wait_s(1) == 1 and bucket.wait_s(60) == 60
    clock.now += 10.5
    assert bucket.level == 10.5 and bucket.wait_s(10) == 0
    bucket.take(70)
    assert bucket.wait_s(1) == 60.5, "a debt is paid first"
    assert bucket.wait_s(1000) == bucket.wait_s(60), "no request waits for more than a full bucket"
    clock.now += 1000
    assert bucket.level == 60
    bucket.take(-5)
    assert bucket.level == 60


def test_requests_per_minute() -> None:
    clock = Clock()
    account = Account(3, clock=clock)
    for left in (2, 1, 0):
        account.take_request()
        assert headers(account)["remaining-requests"] == str(left)
    assert headers(account) == {"limit-requests": "3", "remaining-requests": "0", "reset-requests": "1m0s"}
    with pytest.raises(HttpError) as refused:
        account.take_request()
    assert refused.value.status == 429 and refused.value.code == "rate_limit_exceeded"
    assert refused.value.headers == ((b"retry-after", b"20"),)
    clock.now += 19.9
    with pytest.raises(HttpError):
        account.take_request()
    clock.now += 0.2
    account.take_request()


def test_tokens_are_held_by_estimate_and_charged_by_use() -> None:
    clock = Clock()
    account = Account(None, 100, clock=clock)
    with account.hold([SUBMIT]) as hold:
        assert headers(account) == {"limit-tokens": "100", "remaining-tokens": "50", "reset-tokens": "30s"}
        with account.hold([SUBMIT]) as other:
            with pytest.raises(HttpError, match=r"100 tokens per minute is .* 30\.0 s"), account.hold([SUBMIT]):
                raise AssertionError("the third request was admitted")
            other.num_tokens = 31  # it ended early
        assert headers(account)["remaining-tokens"] == "19"
        hold.num_tokens = 150  # more than estimated
    assert headers(account) == {"limit-tokens": "100", "remaining-tokens": "0", "reset-tokens": "1m48.6s"}
    clock.now += 108.6
    with pytest.raises(ZeroDivisionError), account.hold([SUBMIT]):
        raise ZeroDivisionError
    assert headers(account)["remaining-tokens"] == "100", "a request that was not served costs nothing"


def test_a_request_that_is_larger_than_the_rate_waits_for_a_full_bucket() -> None:
    clock = Clock()
    account = Account(None, 40, clock=clock)
    with account.hold([SUBMIT]) as hold:
        hold.num_tokens = 50
    with pytest.raises(HttpError) as refused, account.hold([SUBMIT]):
        pass
    assert refused.value.headers == ((b"retry-after", b"75"),)
    clock.now += 75
    with account.hold([SUBMIT]):
        assert headers(account)["remaining-tokens"] == "0"


@pytest.mark.parametrize(
    ("prompt", "n", "max_tokens", "estimate"),
    [
        (IdsPrompt(ids_to_bytes([1] * 30)), 3, 20, 90),
        (TextPrompt("x" * 40), 1, 0, 11),
        (ChatPrompt(b"x" * 400, b"y" * 40), 1, None, 111 + 256),
        (PairPrompt("x" * 40, "y" * 40), 1, 0, 21),
    ],
)
def test_estimates(prompt: Any, n: int, max_tokens: int | None, estimate: int) -> None:
    assert estimated_tokens(replace(SUBMIT, prompt=prompt, n=n, limits=Limits(max_tokens=max_tokens))) == estimate


def test_every_key_has_its_own_account() -> None:
    keys = (ApiKey("a", requests_per_minute=1), ApiKey("b", requests_per_minute=2), ApiKey("c"))
    engine = FakeEngine()
    app = make_app(engine, api_keys=keys)

    def ask(key: str, path: str = "/v1/completions", method: str = "POST") -> Any:
        return run(Client(app).call(method, path, b'{"prompt": "x"}', {"authorization": f"Bearer {key}"}))

    assert [ask("a").status for _ in range(2)] == [200, 429]
    assert [ask("b").status for _ in range(3)] == [200, 200, 429]
    answer = ask("c")
    assert answer.status == 200 and not any(name.startswith("x-ratelimit") for name in answer.headers)
    assert ask("a", "/v1/models", "GET").status == 200, "requests without tokens cost nothing"
    assert ask("d").status == 401
    assert engine.gateway.stats.refused == {"rate_limit_exceeded": 2, "invalid_api_key": 1}


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("stream", [False, True])
def test_the_tokens_of_the_usage_are_charged(n: int, stream: bool) -> None:
    engine = FakeEngine()
    app = make_app(engine, tokens_per_minute=1000)
    account = app._keys.caller({}).account
    body = b'{"prompt": ["abc", "abc"], "max_tokens": 9, "n": %d, "stream": %b}' % (n, b"true" if stream else b"false")
    answer = run(Client(app).call("POST", "/v1/completions", body))
    assert answer.headers["x-ratelimit-remaining-tokens"] == str(1000 - 2 * (1 + n * 9))
    used = 2 * 3 + 2 * n * 5
    assert stream or answer.json["usage"]["total_tokens"] == used
    assert 0 <= account._tokens.level - (1000 - used) < 1


def test_refused_requests_give_their_tokens_back() -> None:
    engine = FakeEngine()
    engine.refuse = ("invalid_request", "No.")
    body = {"prompt": "abc", "max_tokens": 100}
    answer = request(engine, "/v1/completions", body, tokens_per_minute=1000)
    assert answer.status == 400 and answer.headers["x-ratelimit-remaining-tokens"] == "1000"


def test_the_tokens_of_pairs_are_charged() -> None:
    fields = {"text_1": "abc", "text_2": ["a", "b"]}
    answer = request(FakeEngine(), "/score", fields, tokens_per_minute=1000, purpose=Purpose(tasks=("score",), size=1))
    assert answer.status == 200 and answer.headers["x-ratelimit-remaining-tokens"] == "996"


def test_openais_client_receives_the_limits_and_the_refusal() -> None:
    with (
        Served(requests_per_minute=2, tokens_per_minute=10_000) as served,
        openai.OpenAI(base_url=served.url, api_key="any", max_retries=0) as client,
    ):
        messages: Any = [{"role": "user", "content": "hi"}]
        raw = client.chat.completions.with_raw_response.create(model="demo", messages=messages, max_tokens=100)
        assert raw.headers["x-ratelimit-limit-requests"] == "2" and raw.headers["x-ratelimit-remaining-requests"] == "1"
        assert raw.headers["x-ratelimit-limit-tokens"] == "10000"
        assert 9000 < int(raw.headers["x-ratelimit-remaining-tokens"]) < 9900
        assert raw.headers["x-ratelimit-reset-requests"].endswith("s")
        assert raw.parse().choices[0].message.content == "Hello 🙂"
        client.models.list()
        client.completions.create(model="demo", prompt="x")
        with pytest.raises(openai.RateLimitError) as refused:
            client.completions.create(model="demo", prompt="x")
        assert refused.value.code == "rate_limit_exceeded"
        assert 1 <= int(refused.value.response.headers["retry-after"]) <= 30
        assert refused.value.response.headers["x-ratelimit-remaining-requests"] == "0"


def test_other_rates_hold_at_once_and_what_was_taken_stays_taken() -> None:
    clock = Clock()
    account = Account(requests_per_minute=60, clock=clock)
    for _ in range(50):
        account.take_request()
    account.change(20, None)
    assert account.buckets["requests"].level == -30
    with pytest.raises(HttpError, match="rate limit of 20 requests per minute"):
        account.take_request()
    account.change(100, 1000)
    assert {name: bucket.level for name, bucket in account.buckets.items()} == {"requests": 50, "tokens": 1000}
    with account.hold_tokens(300) as hold:
        account.change(None, None)  # the request goes on
        hold.num_tokens = 5
    assert account.buckets == {} and headers(account) == {}
    account.take_request()
