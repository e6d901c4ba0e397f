"""Latency classes as an operator writes them."""

import pytest

from pagewire.config.flags import convert
from pagewire.config.latency_classes import DEFAULT_CLASS, LatencyClass, check_classes, with_default
from pagewire.errors import ConfigError


def test_classes_are_json_or_a_table_of_the_file() -> None:
    text = '{"chat": {"ttft_ms": 500, "itl_ms": 50}, "batch": {"weight": 2, "share": 0.5}}'
    found = convert({"latency_classes": text}, strict=False).engine.latency_classes
    assert found == {"chat": LatencyClass(500, 50), "batch": LatencyClass(weight=2, share=0.5)}
    assert convert({"latency_classes": {"chat": {"ttft_ms": 500.0}}}).engine.latency_classes == {
        "chat": LatencyClass(500)
    }


def test_requests_without_a_class_have_one_without_targets_unless_it_is_described() -> None:
    assert with_default(None) == with_default({}) == {}
    assert with_default({"chat": LatencyClass(9)}) == {DEFAULT_CLASS: LatencyClass(), "chat": LatencyClass(9)}
    assert with_default({"default": LatencyClass(9)}) == {DEFAULT_CLASS: LatencyClass(9)}


@pytest.mark.parametrize("name", ["", "Chat", "a b", "auto", "x" * 33, "9"])
def test_a_name_is_short_and_plain(name: str) -> None:
    with pytest.raises(ConfigError, match="is not a name"):
        check_classes({name: LatencyClass()}, "fcfs")


def test_the_policy_slo_needs_classes() -> None:
    check_classes({}, "fcfs")
    check_classes({"chat": LatencyClass()}, "slo")
    with pytest.raises(ConfigError, match="--latency-classes"):
        check_classes({}, "slo")
