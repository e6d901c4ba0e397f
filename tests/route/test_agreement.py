"""Differences between the engines of a model, and when the log tells them."""

from collections.abc import Mapping

import pytest

from pagewire.route.agreement import Agreement, Offer, Server

SAME = Offer("aa", 128, "1.0")


def servers(**offers: Offer | Mapping[str, Offer]) -> list[Server]:
    """By name; an offer stands for that of a model `m`."""
    return [Server(url, {"m": each} if isinstance(each, Offer) else each) for url, each in offers.items()]


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What the log has since the last call."""
    found = [record.getMessage() for record in caplog.records]
    caplog.clear()
    return found


def test_equal_engines_and_other_models_are_no_news(caplog: pytest.LogCaptureFixture) -> None:
    other = {"n": Offer("bb", 64, "1.0")}
    assert Agreement().compare(servers(a=SAME, b=SAME, c=other, d={})) == {} and said(caplog) == []


def test_the_commonest_value_is_the_usual_one(caplog: pytest.LogCaptureFixture) -> None:
    odd = Offer("aa", 64, "1.0")
    found = Agreement().compare(servers(a=odd, b=SAME, c=SAME))
    assert found == {"a": "It serves m with max_model_len 64, and b with 128."}
    assert said(caplog) == ["the engines of m differ in their max_model_len: 128 (b, c), 64 (a)"]


def test_what_an_engine_does_not_say_is_no_difference(caplog: pytest.LogCaptureFixture) -> None:
    assert Agreement().compare(servers(a=Offer("", 0, ""), b=SAME)) == {} and said(caplog) == []


def test_engines_between_which_no_kv_travels_are_named(caplog: pytest.LogCaptureFixture) -> None:
    first, second = (Offer("aa", 128, "1.0", digest * 32) for digest in ("ab", "cd"))
    found = Agreement().compare(servers(a=first, b=second, c=SAME))
    assert found == {"b": f"It serves m with kv_digest {'cd' * 6}, and a with {'ab' * 6}."}
    assert said(caplog) == [f"the engines of m differ in their kv_digest: {'ab' * 6} (a), {'cd' * 6} (b)"]


def test_models_that_differ_alike_share_a_sentence(caplog: pytest.LogCaptureFixture) -> None:
    new = Offer("aa", 128, "1.1")
    found = Agreement().compare(servers(a={"m": SAME, "n": SAME}, b={"m": new, "n": new}))
    assert found == {"b": "It serves m, n with pagewire version 1.1, and a with 1.0."} and len(said(caplog)) == 1


def test_an_engine_that_joins_with_some_of_the_models_is_no_news_of_the_others(
    caplog: pytest.LogCaptureFixture,
) -> None:
    agreement, new = Agreement(), Offer("aa", 128, "1.1")
    both = servers(e1={"m": SAME, "n": SAME}, e2={"m": new, "n": new})
    agreement.compare(both)
    assert said(caplog) == ["the engines of m, n differ in their pagewire version: 1.0 (e1), 1.1 (e2)"]
    found = agreement.compare([*both, *servers(e3={"m": SAME})])
    assert said(caplog) == [], "both models differ as before"
    assert found == {
        "e2": "It serves m with pagewire version 1.1, and e1 with 1.0. "
        "It serves n with pagewire version 1.1, and e1 with 1.0."
    }
    agreement.compare(servers(e1={"m": SAME, "n": SAME}, e2={"m": SAME, "n": new}, e3={"m": SAME}))
    assert said(caplog) == ["the engines of m no longer differ in their pagewire version"]
    agreement.compare(servers(e1={"m": SAME, "n": SAME}, e2={"m": SAME, "n": SAME}))
    assert said(caplog) == ["the engines of n no longer differ in their pagewire version"]


def test_models_that_agree_again_at_once_share_a_line(caplog: pytest.LogCaptureFixture) -> None:
    agreement, new = Agreement(), Offer("aa", 128, "1.1")
    agreement.compare(servers(a={"m": SAME, "n": SAME}, b={"m": new, "n": new}))
    agreement.compare(servers(a={"m": new, "n": new}, b={"m": new, "n": new}))
    assert said(caplog)[1:] == ["the engines of m, n no longer differ in their pagewire version"]


def test_an_upgrade_of_many_engines_is_two_lines(caplog: pytest.LogCaptureFixture) -> None:
    agreement, new = Agreement(), Offer("aa", 128, "1.1")
    for num_new in range(6):
        found = agreement.compare([Server(f"e{i}", {"m": new if i < num_new else SAME}) for i in range(5)])
        assert len(found) == min(num_new, 5 - num_new)
    assert said(caplog) == [
        "the engines of m differ in their pagewire version: 1.0 (e1, e2, e3 and 1 more), 1.1 (e0)",
        "the engines of m no longer differ in their pagewire version",
    ]


def test_a_third_value_is_news(caplog: pytest.LogCaptureFixture) -> None:
    agreement = Agreement()
    agreement.compare(servers(a=SAME, b=Offer("bb", 128, "1.0")))
    agreement.compare(servers(a=SAME, b=Offer("bb", 128, "1.0"), c=Offer("bb", 128, "1.0")))
    assert len(said(caplog)) == 1
    agreement.compare(servers(a=SAME, b=Offer("bb", 128, "1.0"), c=Offer("cc", 128, "1.0")))
    assert said(caplog) == ["the engines of m differ in their files_digest: aa (a), bb (b), cc (c)"]
