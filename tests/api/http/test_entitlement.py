"""Which latency class and priority a request gets by its key, header and body."""

from collections.abc import Mapping, Sequence

import pytest

from pagewire.api.http.entitlement import EVERYTHING, Entitlement
from pagewire.api.http.http_error import HttpError
from pagewire.ipc.messages import IdsPrompt, Limits, Sampling, Submit, TextSpec

CLASSES = ("default", "chat", "batch")
SOME = Entitlement(("batch", "chat"), -2)


def submit(tier: str = "", priority: int = 0) -> Submit:
    return Submit(0, 1, IdsPrompt(b""), Sampling(), Limits(), TextSpec(), priority, latency_class=tier)


def given(
    entitlement: Entitlement, tier: str, headers: Mapping[bytes, bytes] | None = None, classes: Sequence[str] = CLASSES
) -> str:
    found = entitlement.apply([submit(tier), submit(tier)], headers or {}, classes)
    assert entitlement.apply(found, headers or {}, classes) == found, "applied again it gives another class"
    assert len({one.latency_class for one in found}) == 1
    return found[0].latency_class


@pytest.mark.parametrize(
    ("entitlement", "tier", "name"),
    [
        (EVERYTHING, "", "default"),
        (EVERYTHING, "auto", "default"),
        (EVERYTHING, "chat", "chat"),
        (EVERYTHING, "flex", "default"),  # another service's tier
        (SOME, "", "batch"),
        (SOME, "auto", "batch"),
        (SOME, "chat", "chat"),
        (SOME, "priority", "batch"),
        (Entitlement(("gone",)), "", "default"),  # a class that this server does not have
    ],
)
def test_a_request_gets_the_class_that_it_names_or_the_first_of_its_key(
    entitlement: Entitlement, tier: str, name: str
) -> None:
    assert given(entitlement, tier) == name


def test_the_header_goes_before_the_body() -> None:
    assert given(SOME, "batch", {b"x-latency-class": b"chat"}) == "chat"
    assert given(SOME, "chat", {b"x-latency-class": b"auto"}) == "batch"


def test_a_server_without_classes_gives_none() -> None:
    assert given(SOME, "chat", {b"x-latency-class": b"x"}, ()) == ""


@pytest.mark.parametrize(
    ("tier", "headers", "status", "sentence"),
    [
        ("chatt", {}, 400, "service_tier 'chatt' is not a latency class of this server: batch, chat, default."),
        ("", {b"x-latency-class": b"flex"}, 400, "X-Latency-Class 'flex' is not a latency class"),
        ("", {b"x-latency-class": b"\xff"}, 400, "is not a latency class"),
        ("default", {}, 403, "This key may not use the latency class 'default'; it has batch, chat."),
    ],
)
def test_other_names_are_refused(tier: str, headers: dict[bytes, bytes], status: int, sentence: str) -> None:
    with pytest.raises(HttpError) as refused:
        SOME.apply([submit(tier)], headers, CLASSES)
    assert refused.value.status == status and sentence in str(refused.value)


def test_a_key_bounds_the_priority() -> None:
    SOME.apply([submit(priority=-2)], {}, ())
    EVERYTHING.apply([submit(priority=-(2**31))], {}, ())
    with pytest.raises(HttpError, match="priority must be at least -2") as refused:
        SOME.apply([submit(priority=-2), submit(priority=-3)], {}, ())
    assert refused.value.status == 403
