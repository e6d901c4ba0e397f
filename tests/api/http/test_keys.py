"""Which caller a key belongs to."""

import time

import pytest

from pagewire.api.http.http_error import HttpError
from pagewire.api.http.keys import Keys
from pagewire.api.http.rate_limit import Account
from pagewire.config.access import ApiKey


def keys(*names: str) -> Keys:
    return Keys([ApiKey(name) for name in names], Account(None, None, clock=time.monotonic), time.monotonic)


def test_without_keys_all_callers_are_the_same() -> None:
    no_keys = keys()
    assert no_keys.caller({}) is no_keys.caller({b"authorization": b"Bearer x"}) and no_keys.caller({}).salt == b""


def test_each_owner_has_a_salt_and_an_account() -> None:
    two = keys("a", "b")
    first, second = (two.caller({b"authorization": b"Bearer " + key}) for key in (b"a", b"b"))
    assert first is two.caller({b"x-api-key": b"a"}) and first is two.caller({b"authorization": b"bearer  a "})
    assert len({first.salt, second.salt, b""}) == 3 and first.account is not second.account
    assert keys("a").caller({b"x-api-key": b"a"}).salt == b"", "a single owner needs no salt"


@pytest.mark.parametrize("value", [b"", b"a", b"Basic a", b"Bearer", b"Bearer c", b"Bearer aa"])
def test_other_headers_are_refused(value: bytes) -> None:
    with pytest.raises(HttpError) as refused:
        keys("a", "b").caller({b"authorization": value})
    assert refused.value.status == 401


def test_other_keys_and_rates_hold_at_once_and_an_owner_keeps_what_it_has_taken() -> None:
    both = Keys([ApiKey("a", requests_per_minute=5), ApiKey("b")], Account(), time.monotonic)
    before = both.caller({b"x-api-key": b"a"})
    before.account.take_request()
    both.change([ApiKey("c"), ApiKey("a", requests_per_minute=9)])
    after = both.caller({b"x-api-key": b"a"})
    assert after.account is before.account and after.name == before.name == "key ca978112"
    assert 8 <= after.account.buckets["requests"].level < 9
    assert both.caller({b"x-api-key": b"c"}).name != after.name
    with pytest.raises(HttpError):
        both.caller({b"x-api-key": b"b"})
